// The official openai package for Node.
import assert from 'node:assert/strict'
import OpenAI from 'openai'
import { zodResponseFormat } from 'openai/helpers/zod'
import { z } from 'zod'
import { API_KEY, BASE_URL, DEMO, MAX_TOKENS, MODEL, TOOLS, UNKNOWN_MODEL, WRONG_KEY, addUp, rejection, run } from './checks.mjs'

const client = new OpenAI({ baseURL: BASE_URL, apiKey: API_KEY, maxRetries: 0 })
const plain = { model: MODEL, temperature: 0 }
const question = [{ role: 'user', content: DEMO.question }]
const toolQuestion = [{ role: 'user', content: DEMO.tool_question }]

const count = ({ prompt_tokens, completion_tokens, total_tokens }) => addUp(prompt_tokens, completion_tokens, total_tokens)

async function answerOfTool(ask) {
  const message = await ask(toolQuestion)
  assert.equal(message.tool_calls.length, 1)
  const [call] = message.tool_calls
  assert.equal(call.function.name, DEMO.tool_name)
  assert.deepEqual(JSON.parse(call.function.arguments), DEMO.tool_arguments)
  const result = { role: 'tool', tool_call_id: call.id, content: DEMO.tool_result }
  assert.equal((await ask([...toolQuestion, message, result])).content, DEMO.tool_answer)
}

await run({
  async chat() {
    const answer = await client.chat.completions.create({ ...plain, messages: question })
    assert.equal(answer.choices[0].message.content, DEMO.answer)
    count(answer.usage)
  },
  async stream() {
    const chunks = []
    const options = { stream: true, stream_options: { include_usage: true } }
    for await (const chunk of await client.chat.completions.create({ ...plain, messages: question, ...options })) chunks.push(chunk)
    const last = chunks.pop()
    assert.equal(chunks.map((chunk) => chunk.choices[0].delta.content ?? '').join(''), DEMO.answer)
    count(last.usage)
  },
  tools: () =>
    answerOfTool(async (messages) => (await client.chat.completions.create({ ...plain, messages, tools: TOOLS })).choices[0].message),
  tools_streamed: () =>
    answerOfTool((messages) => client.chat.completions.stream({ ...plain, messages, tools: TOOLS }).finalMessage()),
  async structured() {
    const person = z.strictObject({ name: z.enum(['Ada', 'Bob']) })
    const answer = await client.chat.completions.parse({
      ...plain,
      max_tokens: MAX_TOKENS,
      messages: [{ role: 'user', content: DEMO.person_question }],
      response_format: zodResponseFormat(person, 'person'),
    })
    person.parse(answer.choices[0].message.parsed)
  },
  async wrong_key() {
    const stranger = client.withOptions({ apiKey: WRONG_KEY })
    const call = () => stranger.chat.completions.create({ ...plain, messages: question })
    const error = await rejection(OpenAI.AuthenticationError, DEMO.wrong_key_message, call)
    assert.equal(error.code, 'invalid_api_key')
  },
  async unknown_model() {
    const call = () => client.chat.completions.create({ ...plain, model: UNKNOWN_MODEL, messages: question })
    const error = await rejection(OpenAI.NotFoundError, DEMO.unknown_model_message, call)
    assert.deepEqual([error.code, error.param], ['model_not_found', 'model'])
  },
})
