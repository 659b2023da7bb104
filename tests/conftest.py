"""Fixtures: the real Qwen3 tokenizer where it is at hand, the demo's own tokenizer, and a tiny model to run both."""

import os
import signal
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Waiting threads sleep: spinning makes small models up to 100 times slower when other work shares the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(autouse=True)
def signals_are_put_back():
    """A handler that a command leaves behind would change how later tests of the same process end."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.fixture(scope="session")
def qwen3_tokenizer():
    from transformers import AutoTokenizer

    beside = Path(__file__).resolve().parents[2] / "shared" / "tokenizers" / "qwen3"
    path = os.environ.get("ENVACE_QWEN3_TOKENIZER") or (beside if beside.is_dir() else None)
    if path is None:
        pytest.skip("Qwen3 tokenizer not found; set ENVACE_QWEN3_TOKENIZER")
    return AutoTokenizer.from_pretrained(path)


@pytest.fixture(scope="session")
def demo_tokenizer():
    from envace.demo.demonstrations import make_demonstrations
    from envace.demo.desk import CallCounter
    from envace.demo.model import build_tokenizer

    return build_tokenizer((task.tools, messages) for task, messages in make_demonstrations(64, 0, CallCounter()))


@pytest.fixture(params=["qwen3", "demo"])
def tokenizer(request):
    return request.getfixturevalue(f"{request.param}_tokenizer")


@pytest.fixture
def scripted():
    """scripted(chat, *outputs): a `generate` that answers requests in order; `requests` of it keeps what was asked.

    An output is the text of a turn, or a list of ids. Like a sampler it stops at the request's stop tokens and budget.
    """
    from envace.types import Completion

    def build(chat, *outputs):
        remaining = list(outputs)

        def complete(request):
            generate.requests.append((request, list(request.sequence.ids)))
            output = remaining.pop(0)
            ids = output
            if isinstance(output, str):
                ids = chat.response(output) if chat.response_end in request.stop_ids else chat.output(output)
            ids = ids[: request.max_new_tokens]
            stop = next((i + 1 for i, token in enumerate(ids) if token in request.stop_ids), None)
            ids = ids[:stop]
            return Completion(ids, [-0.5 - i for i in range(len(ids))], "length" if stop is None else "stop")

        def generate(requests):
            return [complete(request) for request in requests]

        generate.requests = []
        generate.remaining = remaining
        return generate

    return build


@pytest.fixture(scope="session")
def tiny_model():
    """tiny_model(vocab_size, **Qwen3Config settings): random weights, so large that greedy decoding does not loop."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    def build(vocab_size=400, *, attn_implementation="sdpa", seed=0, **settings):
        config = Qwen3Config(
            vocab_size=vocab_size,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=4096,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
            attn_implementation=attn_implementation,
            **settings,
        )
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            model = Qwen3ForCausalLM(config).eval()
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    parameter.mul_(4)
        return model

    return build
