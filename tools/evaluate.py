"""Evaluate trained models, with confidence intervals.

    python tools/evaluate.py out-shakespeare-char
    python tools/evaluate.py gpt2 gpt2-medium --text=novel.txt --stride=512
    python tools/evaluate.py out-learned out-rotary --context=512     by position, even beyond block_size
    python tools/evaluate.py gpt2 --tasks=hellaswag,lambada_openai --limit=1000   tasks of lm-evaluation-harness
    python tools/evaluate.py out-mine --tasks=questions.yaml                      your own, in its format
    python tools/evaluate.py out-translate --tasks=pairs              answers to held-out prompts
    python tools/evaluate.py out-summarize --tasks=pairs --baseline=first_sentence
    python tools/evaluate.py out-chorales --tasks=music               generated and held-out pieces

Text (the validation set of the run's data, or --text): loss, perplexity and bits per byte, beside the bits per byte of
xz on a validation set; with --context=N, the loss by position in windows of N + 1 consecutive tokens. Tasks of
lm-evaluation-harness: their metrics, with Folio's intervals. Pairs of prompts and completions (the validation set, or
--pairs): exact match of greedy decoding, chrF, BLEU, and ROUGE. Music: how many of 200 generated pieces parse, how well
they keep meter and key, the distance of their intervals and durations from held-out pieces, and how much they copy.

The 95 % intervals are over documents, which may differ in length, or over blocks or windows of a text with fewer than 5
documents. They describe the variance over other text of the same kind, not over training seeds. To find out which of
two models or settings is better, use tools/compare.py.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import folio.machine.openmp  # noqa: E402, F401  # isort: skip  (before torch)
from folio.base.settings import NonNegativeFloat, PositiveInt, run_script  # noqa: E402
from folio.base.terminal import say, terminal_width  # noqa: E402
from folio.checkpoints.find_runs import expand_runs  # noqa: E402
from folio.evaluation.answers import evaluate_baseline  # noqa: E402
from folio.evaluation.compression import format_xz, xz_rows  # noqa: E402
from folio.evaluation.measurement import MeasurementConfig, evaluate_model, name_problems, write_results  # noqa: E402
from folio.evaluation.scores import collect_results  # noqa: E402
from folio.evaluation.tables import format_results  # noqa: E402


@dataclass(frozen=True)
class EvaluateConfig(MeasurementConfig):
    # --- runs ---
    runs: tuple[str, ...] = ()  # runs ("out-*", latest), or what --init_from takes
    # --- loss by position ---
    context: PositiveInt | None = None  # measure the loss by position, up to this many tokens of context
    # --- music ---
    temperature: NonNegativeFloat = 1.0  # for generating the pieces of --tasks=music

    def problems(self) -> list[tuple[str, str]]:
        problems = super().problems() + name_problems("runs", self.runs)
        if not self.runs:
            problems.append(("runs", "name a run, as in: python tools/evaluate.py out-shakespeare-char"))
        if self.is_set("temperature") and "music" not in self.task_names:
            problems.append(("temperature", "it needs --tasks=music"))
        if self.context and (self.tasks or self.stride or self.block_size):
            problems.append(("context", "it cannot be combined with --tasks, --stride, or --block_size"))
        return problems


def main(cfg: EvaluateConfig) -> None:
    models = [evaluate_model(run, cfg, cfg.context, cfg.temperature) for run in expand_runs(cfg.runs)]
    if cfg.baseline:
        models.append(evaluate_baseline(cfg.baseline, models, cfg.group_fields))
    results = collect_results(models)
    print(format_results(models, results, terminal_width(sys.stdout)))
    results["xz"] = []
    for row in xz_rows(models):
        say(format_xz(row))
        results["xz"].append(row)
    write_results(cfg, models, results)


if __name__ == "__main__":
    run_script(main, EvaluateConfig)
