"""Memory of an update's log-probabilities at Qwen3's vocabulary: in chunks, against logits of the whole sequence.

    python -m bench.cases.logprobs chunks|whole

2,048 tokens, 151,936 entries, one small layer, forward and backward. `added_mib`: the peak above what was resident
after an update on four tokens (libraries, weights and gradient buffers).
"""

from __future__ import annotations

import sys

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from bench.measure import peak_mib, seconds, tell
from envace.batching import Row, rows_to_batch
from envace.losses import sft_loss, token_logprobs
from envace.scoring import Scorer, score_inputs

VOCABULARY, TOKENS, CHUNK = 151_936, 2048, 256


def main() -> None:
    in_chunks = sys.argv[1] == "chunks"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config).eval()
    scorer = Scorer(model, model, CHUNK)

    def update(tokens: int) -> float:
        ids = torch.randint(VOCABULARY, (tokens,), generator=torch.Generator().manual_seed(1)).tolist()
        row = Row(ids, [0] + [1] * (tokens - 1), [0.0] + [1.0] * (tokens - 1), [0.0] * tokens)
        batch = rows_to_batch([row], 0)
        if in_chunks:
            inputs = score_inputs(batch, CHUNK, share_start=True)
            logprobs, _ = scorer(**inputs, temperature=0.7, with_entropy=False)
        else:
            logits = model(batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
            logprobs = token_logprobs(logits, batch.input_ids, 0.7)
            del logits
        loss = sft_loss(logprobs, batch.weights)
        loss.backward()
        return float(loss.detach())

    for _ in range(2):
        update(4)
        model.zero_grad(set_to_none=False)
    before = peak_mib()
    with seconds() as found:
        loss = update(TOKENS)
    tell({**found, "added_mib": peak_mib() - before, "loss": loss})


if __name__ == "__main__":
    main()
