"""A model's generation_config: token for token what transformers' own generate makes of it, or a refusal by name."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import flatout
from flatout.errors import UsageError
from flatout.infer.generation.model_settings import read_settings
from flatout.infer.generation.sampling import Sampling, probabilities
from flatout.infer.generation.token_choice import Choice, TokenRules, place_of
from flatout.infer.generation.token_generator import TokenGenerator
from flatout.plan import Plan
from tests.infer.generation.tiny import CONTEXT, END, VOCABULARY, model, prompts

transformers = pytest.importorskip("transformers")
PROMPTS = [*prompts(3, 20), [9]]
NEW = 14


@pytest.fixture(scope="module")
def network() -> Any:
    return model("gpt2")


@pytest.fixture(scope="module")
def generator(network: Any) -> TokenGenerator:
    return TokenGenerator(network)


@pytest.fixture
def config(network: Any) -> Iterator[Any]:
    """The model's own, put back afterwards."""
    before = network.generation_config
    network.generation_config = copy.deepcopy(before)
    yield network.generation_config
    network.generation_config = before


def theirs(network: Any, prompt: list[int], **arguments: Any) -> list[int]:
    """The new tokens of transformers, without what stopped them."""
    arguments.setdefault("pad_token_id", 0)
    ids = torch.tensor([prompt])
    with torch.no_grad():
        made = network.generate(ids, attention_mask=torch.ones_like(ids), **arguments)[0].tolist()[len(prompt) :]
    ends = network.generation_config.eos_token_id
    return made[:-1] if made and made[-1] in (ends if isinstance(ends, list) else [ends]) else made


COMMON = 30, 117, 9, 60, 3, 77, 101, 5
SETTINGS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2},
    {"min_length": 24, "eos_token_id": [END, *range(40, 120)]},
    {"min_new_tokens": 5, "eos_token_id": [END, *range(40, 120)]},
    {"min_new_tokens": 3, "min_length": 30, "eos_token_id": [END, *range(40, 120)]},
    {"eos_token_id": list(range(150, 211))},
    {"suppress_tokens": list(range(100))},
    {"begin_suppress_tokens": list(range(100))},
    {"begin_suppress_tokens": list(range(100)), "forced_bos_token_id": 17},
    {"forced_bos_token_id": 17},
    {"forced_eos_token_id": END},
    {"forced_eos_token_id": [44, END]},
    {"forced_eos_token_id": 44},
    {"bad_words_ids": [[one] for one in range(60)]},
    {"bad_words_ids": [[one, other] for one in range(0, 211, 3) for other in range(0, 211, 7)]},
    {"bad_words_ids": [[END], [30, 40, 50]], "repetition_penalty": 1.2, "no_repeat_ngram_size": 3},
    {"suppress_tokens": [17, 18], "forced_bos_token_id": 19, "min_new_tokens": 4, "repetition_penalty": 1.5},
    {"temperature": 0.3, "top_p": 0.5, "do_sample": False},  # transformers leaves them out of greedy text too
]


@pytest.mark.filterwarnings("ignore")  # transformers on flags that greedy text does not use
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda one: "-".join(one) or "none")
def test_token_for_token_what_transformers_makes_of_it(
    settings: dict[str, Any], network: Any, generator: TokenGenerator, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.update(**settings)
    expected = [theirs(network, one, max_new_tokens=NEW) for one in PROMPTS]
    assert generator.generate(PROMPTS, max_new_tokens=NEW).tokens == expected
    # ... and with guesses, whose tokens stand at several places at once
    monkeypatch.setattr("flatout.infer.generation.speculation.Throttle.choose", lambda self: 3)
    guessing = flatout.generate(network, PROMPTS, max_new_tokens=NEW, plan=Plan(speculation="lookup"))
    assert guessing.tokens == expected


def test_every_setting_of_the_table_changes_some_text(network: Any, generator: TokenGenerator, config: Any) -> None:
    """Else the comparison above would show nothing."""
    plain = generator.generate(PROMPTS, max_new_tokens=NEW).tokens
    changed = []
    for settings in SETTINGS[1:-1]:
        network.generation_config = copy.deepcopy(config)
        network.generation_config.update(**settings)
        changed.append(generator.generate(PROMPTS, max_new_tokens=NEW).tokens != plain)
    assert all(changed), [list(one) for one, differs in zip(SETTINGS[1:], changed, strict=False) if not differs]


@pytest.mark.parametrize(
    "settings", [{"max_new_tokens": 6}, {"max_length": 23}, {"max_length": 20}, {"max_new_tokens": 4, "max_length": 9}]
)
def test_lengths_of_the_model(settings: dict[str, Any], network: Any, generator: TokenGenerator, config: Any) -> None:
    config.update(**settings)
    shorter = [one[:18] for one in PROMPTS]
    expected = [theirs(network, one) for one in shorter]
    made = generator.generate(shorter)
    assert made.tokens == expected
    assert len(generator.generate([PROMPTS[0]], max_new_tokens=3).tokens[0]) <= 3
    assert set(made.model_settings) == {"max_new_tokens" if "max_new_tokens" in settings else "max_length"}


def test_a_default_of_transformers_is_nobody_s_limit(generator: TokenGenerator, config: Any) -> None:
    class Older(type(config)):  # type: ignore[misc]
        """Releases before 5 had it in every config."""

        max_length = 20

        def __init__(self, **given: Any) -> None:
            super().__init__(**given)
            self.max_length = given.get("max_length", 20)

    assert read_settings(type("Model", (), {"generation_config": Older()}), {}).max_length is None
    assert read_settings(type("Model", (), {"generation_config": Older(max_length=30)}), {}).max_length == 30


def test_an_end_token_of_minus_one_ends_nothing(generator: TokenGenerator, config: Any) -> None:
    config.eos_token_id = -1
    made = generator.generate([[9]], max_new_tokens=30)
    assert (made.tokens, made.reasons) == (
        generator.generate([[9]], max_new_tokens=30, ignore_end=True).tokens,
        ["length"],
    )


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"temperature": 0.0}, "generation_config has do_sample = True with temperature = 0.0; .* pass temperature=0"),
        ({"top_p": 0.0}, "the model's generation_config: top_p is 0.0; .* change model.generation_config"),
        ({"suppress_tokens": [VOCABULARY]}, "the model's generation_config: suppress_tokens holds token"),
    ],
)
def test_what_nobody_passed_is_named_as_the_model_s(
    settings: dict[str, Any], told: str, generator: TokenGenerator, config: Any
) -> None:
    config.do_sample = True
    for name, value in settings.items():
        setattr(config, name, value)
    with pytest.raises(UsageError, match=told):
        generator.generate([[1, 2]])
    mine = {"suppress_tokens": [3], "temperature": 0.0}
    assert generator.generate([[1, 2]], max_new_tokens=3, **mine).seed is None


def test_a_max_length_that_is_no_number(generator: TokenGenerator, config: Any) -> None:
    config.max_length = "30"
    with pytest.raises(UsageError, match="the generation_config's max_length is '30'; it is a whole number"):
        generator.generate(PROMPTS)


def test_a_prompt_beyond_max_length(generator: TokenGenerator, config: Any) -> None:
    config.max_length = 5
    with pytest.raises(UsageError, match=r"a prompt has 7 tokens; .* max_length is 5, .* pass max_new_tokens"):
        generator.generate([[9] * 7])


def test_without_any_length_there_are_64(generator: TokenGenerator) -> None:
    made = generator.generate([[9]], ignore_end=True)
    assert (len(made.tokens[0]), made.model_settings) == (64, {})


def _drawn_from(network: Any, logits: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    """What a next token would be drawn from, by the settings of the model."""
    own = read_settings(network, given)
    sampling = Sampling(**{**own.sampling, **given})
    choice = Choice(sampling=sampling, rules=TokenRules(**own.rules).with_ends(own.end_tokens))
    place = place_of([[4, 8, 15]], [3], [9], device=logits.device)
    return probabilities(choice.adjusted(logits, place), sampling)


@pytest.mark.parametrize(
    "settings",
    [
        {"do_sample": True},
        {"do_sample": True, "top_k": 0},
        {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05},
        {"do_sample": True, "top_k": 7, "min_p": 0.1, "suppress_tokens": [3, 4, 5], "min_new_tokens": 2},
    ],
    ids=lambda one: "-".join(one),
)
def test_tokens_are_drawn_from_what_transformers_draws_from(
    settings: dict[str, Any], network: Any, config: Any
) -> None:
    config.update(**settings)
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(2)) * 3
    ready, _ = network._prepare_generation_config(None)
    network._prepare_special_tokens(ready, device="cpu")
    processors = network._get_logits_processor(
        ready, input_ids_seq_length=3, model_kwargs={"attention_mask": torch.ones(1, 3)}, device="cpu"
    )
    expected = processors(torch.tensor([[4, 8, 15]]), logits.clone()).softmax(-1)
    torch.testing.assert_close(_drawn_from(network, logits, {}), expected, rtol=1e-4, atol=1e-6)


def test_what_the_caller_gives_goes_before(network: Any, generator: TokenGenerator, config: Any) -> None:
    plain = generator.generate(PROMPTS, max_new_tokens=NEW).tokens
    config.update(do_sample=True, temperature=0.9, top_k=5, repetition_penalty=1.4, min_new_tokens=3)
    drawn = generator.generate(PROMPTS, max_new_tokens=NEW)
    assert drawn.seed is not None
    assert drawn.model_settings == {"temperature": 0.9, "top_k": 5, "repetition_penalty": 1.4, "min_new_tokens": 3}
    assert "from the model's generation_config: repetition_penalty 1.4" in drawn.summary()
    given = {"temperature": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0}
    greedy = generator.generate(PROMPTS, max_new_tokens=NEW, **given)
    assert (greedy.seed, greedy.tokens, greedy.model_settings) == (None, plain, {})
    assert generator.generate(PROMPTS, max_new_tokens=2, temperature=2.0).model_settings["top_k"] == 5


def test_rules_of_the_caller_for_a_model_without_a_config() -> None:
    own = TokenGenerator(model("own GPT-2"))
    made = own.generate([[1, 2, 3]], max_new_tokens=8, suppress_tokens=range(100, 150), forced_eos_token_id=7)
    assert made.tokens[0][-1] == 7
    assert not set(made.tokens[0]) & set(range(100, 150))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"num_beams": 4}, "num_beams = 4"),
    ({"num_return_sequences": 2}, "num_return_sequences = 2"),
    ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha = 0.6"),
    ({"guidance_scale": 1.5}, "guidance_scale = 1.5"),
    ({"sequence_bias": [[[4], 2.0]]}, r"sequence_bias = \[\[\[4\], 2.0\]\]"),
    ({"exponential_decay_length_penalty": (3, 1.1)}, "exponential_decay_length_penalty"),
    ({"dola_layers": "high"}, "dola_layers = 'high'"),
    ({"max_time": 3.0}, "max_time = 3.0"),
    ({"token_healing": True}, "token_healing = True"),
    ({"constraints": [1]}, "constraints"),
    ({"force_words_ids": [[3]]}, "force_words_ids"),
    ({"watermarking_config": {"bias": 2.0}}, "watermarking_config"),
    ({"do_sample": True, "typical_p": 0.8}, "typical_p = 0.8"),
    ({"encoder_repetition_penalty": 1.2}, "encoder_repetition_penalty = 1.2"),  # of a decoder: about its prompt
    ({"encoder_no_repeat_ngram_size": 2}, "encoder_no_repeat_ngram_size = 2"),
    ({"do_sample": True, "epsilon_cutoff": 0.01}, "epsilon_cutoff = 0.01"),
    ({"do_sample": True, "eta_cutoff": 0.01}, "eta_cutoff = 0.01"),
    ({"do_sample": True, "top_h": 0.4}, "top_h = 0.4"),
]


@pytest.mark.parametrize(("settings", "told"), REFUSED, ids=[next(iter(reversed(one))) for one, _ in REFUSED])
def test_what_cannot_be_carried_out_is_refused_by_name(
    settings: dict[str, Any], told: str, generator: TokenGenerator, config: Any
) -> None:
    for name, value in settings.items():
        setattr(config, name, value)
    match = f"the model's generation_config has {told}.*another one; set model.generation_config"
    with pytest.raises(UsageError, match=match):
        generator.generate([[1, 2]])


@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 1, "use_cache": False, "output_scores": True, "return_dict_in_generate": True},
        {"typical_p": 0.8, "eta_cutoff": 0.1, "penalty_alpha": 0.6, "top_k": 1},  # nothing is drawn
        {"renormalize_logits": True, "cache_implementation": "static", "early_stopping": True, "length_penalty": 2.0},
        {"chat_format": "chatml", "user_token_id": 195},  # known to nobody
    ],
)
def test_what_does_not_change_a_text_is_let_pass(
    settings: dict[str, Any], generator: TokenGenerator, config: Any
) -> None:
    plain = generator.generate(PROMPTS, max_new_tokens=5).tokens
    for name, value in settings.items():
        setattr(config, name, value)
    made = generator.generate(PROMPTS, max_new_tokens=5)
    assert (made.tokens, made.model_settings) == (plain, {})


def test_stop_strings_of_the_model(generator: TokenGenerator, network: Any, config: Any) -> None:
    config.stop_strings = ["x"]
    with pytest.raises(UsageError, match="stop text 'x' without a tokenizer"):
        generator.generate([[1, 2]])

    class Letters:
        def encode(self, text: str) -> list[int]:
            return [ord(letter) for letter in text]

        def decode(self, tokens: list[int]) -> str:
            return "".join(chr(200 + token) for token in tokens)

    config.stop_strings = None
    spoken = TokenGenerator(network, tokenizer=Letters())
    whole = spoken.generate([[1, 2]], max_new_tokens=8).texts
    assert whole is not None
    config.stop_strings = whole[0][3]
    cut = spoken.generate([[1, 2]], max_new_tokens=8)
    assert cut.texts == [whole[0][: whole[0].index(whole[0][3])]]
    assert cut.reasons == ["stop"]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"min_new_tokens": -1}, "min_new_tokens is -1"),
        ({"suppress_tokens": [1.5]}, "suppress_tokens is .*; it holds token ids"),
        ({"suppress_tokens": [VOCABULARY]}, f"suppress_tokens holds token {VOCABULARY}; the model's ids are"),
        ({"bad_words_ids": [[]]}, "bad_words_ids holds an empty list"),
        ({"bad_words_ids": [[3], [4, 999]]}, "bad_words_ids holds token 999"),
        ({"bad_words_ids": 5}, "bad_words_ids is 5; it is a list of lists"),
        ({"forced_eos_token_id": -3}, "forced_eos_token_id is -3; token ids are not negative"),
    ],
)
def test_bad_rules_are_named(settings: dict[str, Any], told: str, generator: TokenGenerator) -> None:
    with pytest.raises(UsageError, match=told):
        generator.generate([[1]], **settings)


def test_the_context_is_longer_than_the_tests() -> None:
    assert max(map(len, PROMPTS)) + 64 < CONTEXT
