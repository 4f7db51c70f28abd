// Vercel's AI SDK with its provider for servers of this kind.
import assert from 'node:assert/strict'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { APICallError, Output, generateText, jsonSchema, stepCountIs, streamText, tool } from 'ai'
import { z } from 'zod'
import { API_KEY, BASE_URL, DEMO, MAX_TOKENS, MODEL, TOOLS, UNKNOWN_MODEL, WRONG_KEY, addUp, rejection, run } from './checks.mjs'

// Without the two switches it asks for no usage of streams, and for no schema in structured output.
const settings = { name: 'hearth', baseURL: BASE_URL, includeUsage: true, supportsStructuredOutputs: true }
const hearth = createOpenAICompatible({ ...settings, apiKey: API_KEY })
const plain = { model: hearth(MODEL), temperature: 0, maxRetries: 0 }

const count = ({ inputTokens, outputTokens, totalTokens }) => addUp(inputTokens, outputTokens, totalTokens)

function offered(called) {
  const execute = (name) => (input) => {
    called.push([name, input])
    return DEMO.tool_result
  }
  const one = ({ function: { name, description, parameters } }) => [
    name,
    tool({ description, inputSchema: jsonSchema(parameters), execute: execute(name) }),
  ]
  return Object.fromEntries(TOOLS.map(one))
}

async function answerOfTool(ask) {
  const called = []
  const text = await ask({ ...plain, prompt: DEMO.tool_question, tools: offered(called), stopWhen: stepCountIs(3) })
  assert.deepEqual(called, [[DEMO.tool_name, DEMO.tool_arguments]])
  assert.equal(text, DEMO.tool_answer)
}

await run({
  async chat() {
    const { text, usage } = await generateText({ ...plain, prompt: DEMO.question })
    assert.equal(text, DEMO.answer)
    count(usage)
  },
  async stream() {
    const result = streamText({ ...plain, prompt: DEMO.question })
    const pieces = []
    for await (const piece of result.textStream) pieces.push(piece)
    assert.equal(pieces.join(''), DEMO.answer)
    assert.ok(pieces.length > 1, 'it came in one piece')
    count(await result.usage)
  },
  tools: () => answerOfTool(async (request) => (await generateText(request)).text),
  tools_streamed: () => answerOfTool((request) => streamText(request).text),
  async structured() {
    const schema = z.strictObject({ name: z.enum(['Ada', 'Bob']) })
    const request = { ...plain, prompt: DEMO.person_question, maxOutputTokens: MAX_TOKENS, output: Output.object({ schema }) }
    schema.parse((await generateText(request)).output)
  },
  async wrong_key() {
    const stranger = createOpenAICompatible({ ...settings, apiKey: WRONG_KEY })
    const call = () => generateText({ ...plain, model: stranger(MODEL), prompt: DEMO.question })
    assert.equal((await rejection(APICallError, DEMO.wrong_key_message, call)).statusCode, 401)
  },
  async unknown_model() {
    const call = () => generateText({ ...plain, model: hearth(UNKNOWN_MODEL), prompt: DEMO.question })
    assert.equal((await rejection(APICallError, DEMO.unknown_model_message, call)).statusCode, 404)
  },
})
