"use strict";

// A prompt is sent to /v1/completions, whose events are shown as they arrive. /health says what the cache holds.

const MOST_PAGES_SHOWN = 512; // of a shard; each square is then several pages
const byId = (id) => document.getElementById(id);
let running = null;

async function send() {
  running = new AbortController();
  byId("send").disabled = true;
  byId("stop").disabled = false;
  byId("answer").textContent = "";
  byId("answer").classList.remove("bad");
  byId("speed").textContent = "";
  try {
    await stream(running.signal);
  } catch (error) {
    if (error.name !== "AbortError") fail(error.message);
  }
  running = null;
  byId("send").disabled = false;
  byId("stop").disabled = true;
}

async function stream(signal) {
  const begin = performance.now();
  let first = null;
  let usage = null;
  const response = await fetch("v1/completions", {
    method: "POST", signal,
    headers: { "Content-Type": "application/json", ...authorization() },
    body: JSON.stringify({
      prompt: byId("prompt").value, max_tokens: Number(byId("max_tokens").value),
      temperature: Number(byId("temperature").value), stream: true, stream_options: { include_usage: true },
    }),
  });
  if (!response.ok) throw new Error((await response.json()).error.message);
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    first ??= performance.now();
    for (const choice of event.choices) byId("answer").textContent += choice.text;
    usage = event.usage ?? usage;
  }
  const end = performance.now();
  const tokens = usage.completion_tokens;
  const rate = tokens > 1 ? `, then ${((1000 * (tokens - 1)) / (end - first)).toFixed(0)} tokens/s` : "";
  const reused = usage.prompt_tokens_details.cached_tokens;
  byId("speed").textContent =
    `${tokens} tokens, the first after ${(first - begin).toFixed(0)} ms${rate}; ` +
    `${reused} of the prompt's ${usage.prompt_tokens} tokens were in the cache`;
}

async function* events(response) {
  const decoder = new TextDecoder();
  let text = "";
  for (const reader = response.body.getReader(); ; ) {
    const { done, value } = await reader.read();
    if (done) return;
    text += decoder.decode(value, { stream: true });
    const complete = text.split("\n\n");
    text = complete.pop();
    for (const line of complete) {
      const data = line.slice("data: ".length);
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

function authorization() {
  const token = byId("token").value;
  return token ? { Authorization: `Bearer ${token}` } : {};
}

function fail(message) {
  byId("answer").textContent = message;
  byId("answer").classList.add("bad");
}

async function look() {
  try {
    const health = await (await fetch("health")).json();
    byId("model").textContent = health.model;
    const { running, all, queued } = health.slots;
    byId("status").textContent = `${health.status}: ${running} of ${all} slots are used, ${queued} requests wait`;
    byId("pages").replaceChildren(...health.pages.map(shard));
  } catch {
    byId("status").textContent = "the server does not answer";
  }
  setTimeout(look, running ? 100 : 500);
}

function shard({ held, reusable, all }) {
  const scale = Math.min(1, MOST_PAGES_SHOWN / all);
  const box = document.createElement("div");
  box.className = "shard";
  box.title = `${held} pages are held, ${reusable} are kept, of ${all}`;
  const numHeld = Math.ceil(held * scale);
  const numReusable = Math.ceil(reusable * scale);
  for (let i = 0; i < Math.ceil(all * scale); i++) {
    const square = document.createElement("span");
    square.className = i < numHeld ? "page held" : i < numHeld + numReusable ? "page reusable" : "page";
    box.append(square);
  }
  return box;
}

byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
byId("stop").addEventListener("click", () => running?.abort());
look();
