"use strict";
// The blocks of data that the page carries: gzipped JSON in base64.

async function readBlock(id) {
  const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

const CHUNK = 100; // as in build.py
const chunks = new Map();

function chunk(number) {
  if (!chunks.has(number)) chunks.set(number, readBlock(`chunk${number}`));
  return chunks.get(number);
}

async function trajectoryAt(position) {
  return (await chunk(Math.floor(position / CHUNK)))[position % CHUNK];
}

const whenIdle = globalThis.requestIdleCallback ?? ((call) => setTimeout(call)); // Safari has none
const texts = []; // of the trajectories so far all that can be searched, in lower case

/** Fills `texts`, a chunk whenever the page is idle; `onMore` is called behind each. */
async function readTexts(onMore) {
  for (let number = 0; document.getElementById(`chunk${number}`); number++) {
    await new Promise((resolve) => whenIdle(resolve, { timeout: 50 }));
    for (const t of await chunk(number)) {
      const parts = [t.task, t.kind, t.group_id, t.reason, ...(t.user_turns ?? [])];
      texts.push([...parts, ...(t.segments ?? []).map((s) => s.text ?? "")].join("\n").toLowerCase());
    }
    onMore();
  }
}
