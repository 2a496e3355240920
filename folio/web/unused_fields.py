"""Fields that a request may have and that this server does not use: OpenAI's, and those of other servers.

A request is never answered as if it had asked for something else. A field that cannot change the answer is accepted
with any value (HARMLESS). Any other field is refused by name, unless its value asks for what the server does anyway
(REFUSED lists these values). A field in no table may be a typing error or newer than Folio, so it is refused, too.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, NamedTuple

from folio.base.files import shorten
from folio.web.server import RequestError

MAX_NAME_LENGTH = 100  # characters of an unknown name in an error message
CHOICES = {"tools": "tool_choice", "functions": "function_call"}  # a list -> the field that says whether to call them


class Refusal(NamedTuple):
    """Why a field is refused, or what to use instead."""

    reason: str
    neutral: tuple[Any, ...]  # values that are accepted, because they ask for what the server does anyway


def _refused(reason: str, names: str, *neutral: Any) -> dict[str, Refusal]:
    return dict.fromkeys(names.split(), Refusal(reason, neutral))


HARMLESS = frozenset(
    " ".join(
        (
            "user metadata store safety_identifier request_id",  # they describe the request or its sender
            "service_tier prediction prompt_cache_key prompt_cache_retention",  # they concern speed: OpenAI's
            "priority cache_salt cache_prompt id_slot keep_alive",  # vLLM's, llama.cpp's, Ollama's
            "add_special_tokens add_special spaces_between_special_tokens",  # tokenizers of Folio add no special tokens
            # These have an effect only with fields that are refused, in this order: tools, guided_json etc., mirostat,
            # dynatemp_range and xtc_probability, dry_multiplier.
            "parallel_tool_calls guided_decoding_backend guided_whitespace_pattern mirostat_tau mirostat_eta",
            "dynatemp_exponent xtc_threshold dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers",
        )
    ).split()
)

TOOLS = "the model cannot call tools"
CONSTRAINED = "the text cannot be constrained to a format"
TEXT_ONLY = "the model reads and writes only text"
MODE = "the model has no such mode"
ONE_MODEL = "the server has one model"
SAMPLING = "the server does not have this way of sampling"
END = "an answer ends at the end of text; to exclude that token, give it -100 in logit_bias"
EXCLUDED = "use logit_bias, where -100 excludes a token"
PROMPT = "the prompt has the format of the training data"
SHAPE = "the answer has only the fields of OpenAI's API"

REFUSED: dict[str, Refusal] = {
    # --- the answer is text ---
    **_refused(TOOLS, "tools functions", []),
    **_refused(TOOLS, "tool_choice function_call", "none", "auto"),
    **_refused(CONSTRAINED, "response_format", {"type": "text"}),
    **_refused(CONSTRAINED, "guided_json guided_regex guided_choice guided_grammar"),  # vLLM
    **_refused(CONSTRAINED, "structured_outputs structural_tag regex ebnf json_schema"),  # vLLM, SGLang, llama.cpp
    **_refused(CONSTRAINED, "grammar format", ""),  # llama.cpp, Ollama
    **_refused(TEXT_ONLY, "modalities", ["text"]),
    **_refused(TEXT_ONLY, "images image_data", []),
    **_refused(TEXT_ONLY, "audio input_audio"),
    **_refused(MODE, "reasoning_effort", "none"),
    **_refused(MODE, "think", False),
    **_refused(MODE, "verbosity", "medium"),
    **_refused(MODE, "reasoning thinking web_search_options"),
    **_refused(ONE_MODEL, "models lora", []),
    **_refused(ONE_MODEL, "adapter_id lora_path"),
    # --- other names for fields of this server ---
    **_refused("use prompt in /v1/completions, or messages in /v1/chat/completions", "prompt messages input inputs"),
    **_refused("use max_tokens", "max_completion_tokens max_output_tokens max_new_tokens max_tokens_to_sample"),
    **_refused("use max_tokens", "n_predict num_predict"),  # llama.cpp, Ollama
    **_refused("use n", "best_of num_samples num_return_sequences", 1),
    **_refused("use stop, with the text at which to end", "stop_sequences stop_token_ids", []),
    **_refused("use seed", "random_seed"),
    **_refused("use repetition_penalty, which counts the whole text", "repeat_penalty", 1),
    **_refused("use repetition_penalty, which counts the whole text", "repeat_last_n", -1),
    **_refused("use temperature=0 for greedy decoding", "do_sample", True),
    **_refused("use logprobs", "top_logprobs n_probs top_n_tokens", 0),
    **_refused("only the new tokens have log-probabilities; folio.load computes those of a text", "prompt_logprobs"),
    **_refused("the context length is the model's; use context_stride", "num_ctx truncate_prompt_tokens"),
    **_refused("give its fields next to the others", "options parameters extra_body", {}),
    # --- sampling, and the end of an answer ---
    **_refused(SAMPLING, "typical_p typ_p tfs_z encoder_repetition_penalty length_penalty", 1),
    **_refused(SAMPLING, "guidance_scale cfg_scale num_beams", 1),
    **_refused(SAMPLING, "mirostat mirostat_mode top_a dry_multiplier xtc_probability dynatemp_range", 0),
    **_refused(SAMPLING, "smoothing_factor epsilon_cutoff eta_cutoff no_repeat_ngram_size penalty_alpha min_keep", 0),
    **_refused(SAMPLING, "watermark use_beam_search early_stopping penalize_nl", False),
    **_refused(SAMPLING, "top_n_sigma", -1, 0),
    **_refused(SAMPLING, "samplers"),
    **_refused(EXCLUDED, "bad_words bad_words_ids allowed_token_ids logits_processors", []),
    **_refused(END, "min_tokens min_new_tokens", 0),
    **_refused(END, "ignore_eos", False),
    # --- the prompt, and the form of the answer ---
    **_refused(PROMPT, "chat_template template system", ""),
    **_refused(PROMPT, "chat_template_kwargs documents context", {}, []),
    **_refused(PROMPT, "add_generation_prompt", True),
    **_refused(PROMPT, "continue_final_message raw", False),
    **_refused("the model cannot fill in text before a suffix", "suffix", ""),
    **_refused("the answer is only the new text", "echo return_full_text decoder_input_details", False),
    **_refused("the answer ends before the stop string", "include_stop_str_in_output no_stop_trim", False),
    **_refused(SHAPE, "skip_special_tokens", True),
    **_refused(SHAPE, "return_token_ids return_tokens return_tokens_as_token_ids", False),
    **_refused(SHAPE, "details timings_per_token post_sampling_probs return_progress", False),
    **_refused(SHAPE, "response_fields", []),
}


def check_unused_fields(body: dict[str, Any], used: Iterable[str]) -> None:
    """Raise RequestError for a field that is not in `used` and may change the answer. null is always accepted."""
    used = list(used)
    for name, value in body.items():
        if name in used or name in HARMLESS or value is None or is_neutral(name, value, body):
            continue
        if name in REFUSED:
            raise RequestError(f"{name} is not supported: {REFUSED[name].reason}, or leave it out", name)
        name = shorten(name, MAX_NAME_LENGTH)
        close = get_close_matches(name, used, n=1)
        hint = f"did you mean {close[0]}?" if close else "leave it out"
        raise RequestError(f"{name} is not a field of this request; {hint}", name)


def is_neutral(name: str, value: Any, body: dict[str, Any]) -> bool:
    """Whether a field asks for what the server does anyway. Tools that must not be called are such a field."""
    if name in CHOICES and body.get(CHOICES[name]) == "none":
        return True
    return name in REFUSED and value in REFUSED[name].neutral
