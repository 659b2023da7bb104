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

let texts = null;

/** Of every trajectory all that can be searched, in lower case. Made once, when it is first asked for. */
function searchTexts() {
  texts ??= (async () => {
    const all = [];
    for (let number = 0; document.getElementById(`chunk${number}`); number++) {
      for (const t of await chunk(number)) {
        const parts = [t.task, t.kind, t.group_id, t.reason, ...(t.user_turns ?? [])];
        all.push([...parts, ...(t.segments ?? []).map((s) => s.text ?? "")].join("\n").toLowerCase());
      }
      await new Promise((resolve) => setTimeout(resolve)); // the page stays alive in between
    }
    return all;
  })();
  return texts;
}
