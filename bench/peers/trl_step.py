"""The peer of `bench.cases.step`: TRL's GRPOTrainer with an environment factory, in a virtual environment of its own.

    .bench/trl/bin/python -m bench.peers.trl_step STEPS THREADS MODEL_FOLDER

Makes the model that both train, then takes 1 + STEPS optimizer steps; the first one is not counted.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, TrainerCallback

from bench import work
from bench.measure import peak_mib, seconds, tell


class Room:
    """What the harness makes a tool of is the docstring and the annotations of `look`."""

    def reset(self, **row):
        return None

    def look(self, place: str) -> str:
        """Look at a place.

        Args:
            place: the place to look at.
        """
        return work.RESPONSE


class Scripted(trl.GRPOTrainer):
    """Samples as always; then a valid call, or an answer, of the same length stands in place of a random model's."""

    sampled = 0

    def _generate(self, *arguments, **options):
        self.turn = 0
        return super()._generate(*arguments, **options)

    def _generate_single_turn(self, *arguments, **options):
        ids, logprobs = super()._generate_single_turn(*arguments, **options)
        Scripted.sampled += sum(map(len, ids))
        script = work.output(self.processing_class, self.turn)
        self.turn += 1
        return [list(script) for _ in ids], logprobs


class Clock(TrainerCallback):
    """Generation, too, lies between the begin and the end of a step."""

    def __init__(self):
        self.steps = []

    def on_step_begin(self, *_, **__):
        self.block = seconds()
        self.found = self.block.__enter__()

    def on_step_end(self, *_, **__):
        self.block.__exit__(None, None, None)
        self.steps.append(self.found)


def make_model(folder: Path) -> None:
    """A tiny Qwen3 with random weights, and a tokenizer of 2,000 tokens made of the peer's own source."""
    text = Path(trl.__path__[0], "trainer", "grpo_trainer.py").read_text(encoding="utf-8")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    first, *others = work.SPECIAL_TOKENS
    trainer = trainers.BpeTrainer(
        vocab_size=work.VOCABULARY - len(others), special_tokens=[first], initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator([text], trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token=first)
    wrapped.add_tokens(others)
    wrapped.chat_template = Path(trl.__path__[0], "chat_templates", "qwen3.jinja").read_text(encoding="utf-8")
    torch.manual_seed(0)
    ends = {"eos_token_id": wrapped.eos_token_id, "pad_token_id": wrapped.pad_token_id, "bos_token_id": None}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(wrapped), **work.SHAPE, **ends))
    model.save_pretrained(folder)
    wrapped.save_pretrained(folder)


def main() -> None:
    steps, threads, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(threads)
    if not folder.exists():
        make_model(folder)
    clock = Clock()
    with TemporaryDirectory() as out:
        settings = trl.GRPOConfig(
            output_dir=out,
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=work.PROMPTS * work.GROUP,
            num_generations=work.GROUP,
            gradient_accumulation_steps=1,
            gradient_checkpointing=False,
            max_steps=1 + steps,
            max_completion_length=4096,
            max_tool_calling_iterations=work.TURNS,
            generation_kwargs={"min_new_tokens": work.NEW_TOKENS, "max_new_tokens": work.NEW_TOKENS},
            learning_rate=1e-4,
            beta=0.0,
            temperature=1.0,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = Scripted(
            model=Qwen3ForCausalLM.from_pretrained(folder),
            processing_class=PreTrainedTokenizerFast.from_pretrained(folder),
            reward_funcs=lambda completions, **_: [work.reward(i) for i in range(len(completions))],
            args=settings,
            train_dataset=Dataset.from_list([{"prompt": work.messages(k)} for k in range(8)]),
            environment_factory=Room,
            callbacks=[clock],
        )
        trainer.train()
    counted = clock.steps[1:]
    tell(
        {
            "cpu_s": sum(step["cpu_s"] for step in counted) / steps,
            "wall_s": sum(step["wall_s"] for step in counted) / steps,
            "peak_mib": peak_mib(),
            "sampled_tokens": Scripted.sampled / (1 + steps),
            "trl": trl.__version__,
        }
    )


if __name__ == "__main__":
    main()
