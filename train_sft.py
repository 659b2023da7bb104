"""Supervised warm-up: teach one policy both roles from recorded dialogues.

    python train_sft.py --config configs/demo.yaml [key=value ...]

The loss is the negative log-likelihood of the tokens of `sft.roles`: ACT's outputs, and the recorded responses in the
place where REHEARSE will write them. The result is <run_dir>/sft, an ordinary Hugging Face folder.
"""

from __future__ import annotations

import math
import time
from pathlib import Path

from envace.batching import sft_rows, total_weight
from envace.checkpoints import Checkpoints
from envace.console import run
from envace.data import Dialogue, Sampler, open_source, short_enough
from envace.demonstrations import demonstration
from envace.losses import sft_loss
from envace.memory import describe
from envace.policy import Policy, check_output, learning_rate
from envace.settings import Config
from envace.tracking import Tracker, logger, places
from envace.types import Trajectory


def main(config: Config) -> Path:
    output = Path(config.run_dir) / "sft"
    check_output(output, config.model.path)
    source = open_source(config)
    policy = Policy(
        config.model,
        config.policy,
        thinking=config.rollout.thinking,
        seed=config.seed,
        training=True,
        build=(lambda path: source.build_embedded_model(path, config.seed)) if config.model.embedded else None,
    )
    policy.prepare_training(
        lr=config.sft.lr,
        adam_beta2=config.sft.adam_beta2,
        weight_decay=config.sft.weight_decay,
        grad_clip=config.sft.grad_clip,
        max_nonfinite_steps=config.sft.max_nonfinite_steps,
        with_reference=False,
    )
    if policy.is_sharded:
        logger.info(describe(config, policy.model.config, policy.num_parameters, policy.world_size, "sft"))
    separate, grounded = config.rollout.view == "separate", config.rehearse.grounding != "none"

    def trajectory(dialogue: Dialogue) -> Trajectory:
        return demonstration(*dialogue, policy.chat, separate=separate, grounded=grounded)

    def longest(dialogue: Dialogue) -> int:
        return max(map(len, trajectory(dialogue).sequences))

    # The sequences themselves are made when they are drawn: those of a large data set would fill the memory.
    dialogues = short_enough(source.demonstrations(), longest, config.sft.max_tokens, "dialogues")
    steps = config.sft.steps
    if config.sft.epochs:
        steps = math.ceil(config.sft.epochs * len(dialogues) / config.sft.batch_size)
    sampler = Sampler(dialogues, config.seed, [task.id for task, _ in dialogues])
    checkpoints = Checkpoints(policy, config, "sft", {"sampler": sampler})
    first = checkpoints.resume()
    with (
        Tracker(
            config.run_dir,
            config,
            name="sft",
            total_steps=steps,
            enabled=policy.is_main,
            first_step=first,
        ) as tracker,
        checkpoints,
    ):
        bar = tracker.progress(range(first, steps), "train both roles")
        for step in bar:
            started = time.perf_counter()
            rows = sft_rows(list(map(trajectory, sampler.next(config.sft.batch_size))), config.sft.roles)
            denominator = total_weight(rows)
            loss_sum = 0.0
            for batch in policy.accumulating(policy.micro_batches(rows, config.sft.micro_batch_size)):
                logprobs, _ = policy.logprobs(batch, temperature=1.0, with_entropy=False)
                loss = sft_loss(logprobs, batch.weights, denominator=denominator)
                policy.backward(loss)
                loss_sum += float(loss.detach())
            lr = learning_rate(
                step,
                steps=steps,
                peak=config.sft.lr,
                warmup=config.sft.warmup,
                schedule=config.sft.schedule,
            )
            stepped = policy.step(lr)
            metrics = {
                "loss/sft": policy.sum_over_ranks(loss_sum),
                "lr": lr,
                **stepped,
                "throughput/trained_tokens_per_second": sum(map(len, rows)) / (time.perf_counter() - started),
            }
            tracker.log(step, metrics)
            bar.set_postfix_str(f"loss {metrics['loss/sft']:.4g}", refresh=False)
            policy.check_progress()
            checkpoints.after_step(step, steps)
        if policy.skipped_steps:
            logger.warning("%d steps were skipped: their gradient was not finite", policy.skipped_steps)
        policy.save(output)
    return output


def summary(config: Config, output: Path) -> dict[str, str]:
    found = places(config, "sft", weights=output)
    return found | {"next": f'make rl CONFIG={found["config"]} ARGS="model.path={output}"'}


if __name__ == "__main__":
    run(main, __doc__, summary)
