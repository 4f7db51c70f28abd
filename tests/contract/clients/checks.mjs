// What the Node clients share, the counterpart of checks.py: where the server is, what the demo model answers, one line of JSON per check.
import assert from 'node:assert/strict'
import { readFileSync, realpathSync } from 'node:fs'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'

// This folder is run through a link that lies beside node_modules; the files that are read lie where it points to.
const read = (path) => JSON.parse(readFileSync(join(realpathSync(fileURLToPath(new URL('.', import.meta.url))), path), 'utf8'))

export const { BASE_URL, API_KEY, MODEL = 'service-plus' } = process.env
export const WRONG_KEY = 'sk-wrong'
export const UNKNOWN_MODEL = 'nobody'
export const DEMO = read('demo.json')
export const TOOLS = read('../../../scripts/demo_models/chat/tools.json').offered
export const MAX_TOKENS = 200

export function addUp(prompt, completion, total) {
  assert.ok(prompt > 0 && completion > 0, `${prompt}, ${completion}`)
  assert.equal(total, prompt + completion)
}

// Resolves to what `call` throws: a `kind` with our words in it.
export async function rejection(kind, message, call) {
  const error = await call().then(() => assert.fail('nothing was thrown'), (thrown) => thrown)
  assert.ok(error instanceof kind, `${error?.stack ?? error}`)
  assert.ok(error.message.includes(message), error.message)
  return error
}

export async function run(checks) {
  for (const [check, body] of Object.entries(checks)) {
    const line = { check, ok: true }
    try {
      await body()
    } catch (error) {
      Object.assign(line, { ok: false, error: `${error?.stack ?? error}` })
      process.exitCode = 1
    }
    console.log(JSON.stringify(line))
  }
}
