"""An update on one sequence a trajectory, against one row an output: the layout of the released code.

    python -m bench.cases.layout sequence|outputs|equal [THREADS]

A row of one output is all that stood before it and the output itself, so the prefix is computed again for every output.
Four trajectories of one prompt, outputs of both roles; `equal` compares the gradients of the two layouts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from bench import work
from bench.measure import peak_mib, seconds, tell
from envace.batching import Row, divide, rows_from_trajectories, rows_to_batch, total_weight
from envace.losses import policy_loss
from envace.scoring import Scorer, score_inputs
from envace.types import Evidence, Role, Segment, Sequence, Task, Trajectory

TRAJECTORIES, PROMPT, OUTPUT, FRAME = 4, 200, 40, 5
TURNS = (5, 10, 30)
MICRO_BATCH = 4
CHUNK = 1024


def trajectories(turns: int) -> list[Trajectory]:
    """Prompt, then ACT and REHEARSE in turn, frames between them, and an answer."""
    random = torch.Generator().manual_seed(turns)

    def segment(role: Role, size: int) -> Segment:
        ids = torch.randint(1, work.VOCABULARY, (size,), generator=random).tolist()
        return Segment(role, ids, Evidence.GIVEN)

    prompt = segment(Role.CONTEXT, PROMPT)
    made = []
    for number in range(TRAJECTORIES):
        segments = [prompt]
        for _ in range(turns):
            for role in (Role.ACT, Role.REHEARSE):
                segments += [segment(role, OUTPUT - number), segment(Role.CONTEXT, FRAME)]
        segments.append(segment(Role.ACT, OUTPUT))
        made.append(Trajectory(Task("t", "", [], []), "t", sequences=[Sequence(segments)], reward=0.0))
    return made


def one_row_a_sequence(made: list[Trajectory]) -> list[Row]:
    outputs = sum(len(trajectory.outputs()) for trajectory in made)
    advantages = torch.randn(outputs, generator=torch.Generator().manual_seed(0))
    weights = {"act": 1.0, "rehearse": 1.0}
    return rows_from_trajectories(made, advantages, loss_aggregation="token_mean", role_weights=weights)


def one_row_an_output(made: list[Trajectory]) -> list[Row]:
    rows = []
    for whole, trajectory in zip(one_row_a_sequence(made), made, strict=True):
        end = 0
        for segment in trajectory.sequences[0].segments:
            begin, end = end, end + len(segment.ids)
            if segment.role is not Role.CONTEXT:
                weights = [0.0] * begin + whole.weights[begin:end]
                rows.append(Row(whole.ids[:end], whole.role_ids[:end], weights, whole.advantages[:end]))
    return rows


LAYOUTS: dict[str, Callable[[list[Trajectory]], list[Row]]] = {
    "sequence": one_row_a_sequence,
    "outputs": one_row_an_output,
}


def make_scorer() -> Scorer:
    torch.manual_seed(0)
    shape = work.SHAPE | {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 2}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=work.VOCABULARY, **shape)).eval()
    return Scorer(model, model, CHUNK)


def update(scorer: Scorer, rows: list[Row]) -> int:
    """Add the gradient of the policy loss; how many tokens went through the model, padding included."""
    denominator, tokens = total_weight(rows), 0
    [parts] = divide(rows, 1, MICRO_BATCH)
    for part in parts:
        batch = rows_to_batch(part, 0)
        inputs = score_inputs(batch, CHUNK, share_start=True)
        logprobs, _ = scorer(**inputs, temperature=1.0, with_entropy=False)
        loss, _ = policy_loss(
            logprobs,
            None,
            None,
            batch.advantages,
            batch.weights,
            clip_eps_low=0.2,
            clip_eps_high=0.2,
            kl_coef=0.0,
            kl_estimator="k3",
            denominator=denominator,
        )
        loss.backward()
        tokens += batch.input_ids.numel() - inputs["shared"] * (len(part) - 1)
    return tokens


def gradient(scorer: Scorer, rows: list[Row]) -> torch.Tensor:
    scorer.zero_grad()
    update(scorer, rows)
    return torch.cat([p.grad.flatten() for p in scorer.parameters() if p.grad is not None])


def main() -> None:
    variant, threads = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1
    torch.set_num_threads(threads)
    scorer = make_scorer()
    # Both ways warm up on the same rows, so that they start from the same memory.
    for _ in range(2):
        update(scorer, one_row_a_sequence(trajectories(1)))
    base, found = peak_mib(), {}
    for turns in TURNS:
        made = trajectories(turns)
        name = f"{turns} turns"
        if variant == "equal":
            one, other = (gradient(scorer, layout(made)) for layout in LAYOUTS.values())
            found[name] = {"relative_difference": float((one - other).norm() / other.norm())}
            continue
        rows = LAYOUTS[variant](made)
        with seconds() as took:
            tokens = update(scorer, rows)
        found[name] = {**took, "tokens": tokens, "added_mib": peak_mib() - base}
    tell(found)


if __name__ == "__main__":
    main()
