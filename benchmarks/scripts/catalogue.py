"""The public scripts: where each comes from, how it is called, what a fair comparison of its output must leave out.

`argv`, `env` and `stand_in` describe a short whole run (20 to 90 s on two cores), for comparisons of complete runs.
The fields `tuned_...` describe the run that a user would really start, with full-size data and the scripts' own
epochs: what pays off in a run of an hour does not in one of a minute, so tuning must see that one. It is never run to
its end here.

In `env`, {checkout} is the copy that the run works in and {packages} the folder of the stand-in packages.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.scripts.standins import text

OWN_EXAMPLES = "this project"
STAND_IN_PACKAGES = {"PYTHONPATH": "{packages}"}


@dataclass(frozen=True, kw_only=True)
class PublicScript:
    """One training script of somebody else's."""

    name: str
    repository: str  # owner/name, or OWN_EXAMPLES
    directory: str  # where it is started, inside the repository
    argv: tuple[str, ...]  # the script and its arguments
    tuned_argv: tuple[str, ...] | None = None  # None: as argv
    env: Mapping[str, str] = field(default_factory=dict)
    tuned_env: Mapping[str, str] | None = None  # None: as env
    stand_in: Callable[[Path], None] | None = None  # writes data; gets the directory
    tuned_stand_in: Callable[[Path], None] | None = None  # None: as stand_in
    time_patterns: tuple[str, ...] = ()  # what in its stdout depends on the clock
    artifacts: tuple[str, ...] = ()  # files it writes that must be the same byte for byte
    seeded: bool = True  # False: it sets no seed, so comparisons start it with one
    packages: tuple[str, ...] = ()  # beside torch and numpy
    goal: float | None = None  # how much faster tuning must make it on a two-core CPU with bf16 units

    @property
    def checkout_name(self) -> str:
        """The folder that `git clone` makes, or that of this project's examples."""
        return self.repository.rpartition("/")[2]


def write_word_corpus(directory: Path, words: int, vocabulary: int) -> None:
    text.write_corpus(directory / "standin", words=words, vocabulary=vocabulary)


def write_treebank(directory: Path, words: int) -> None:
    text.write_treebank(directory / "data" / "train.txt", words=words)


def write_characters(directory: Path) -> None:
    text.write_characters(directory / "data" / "shakespeare_char", characters=1_100_000)


WORD_LANGUAGE_MODEL = PublicScript(
    name="word_language_model",
    repository="pytorch/examples",
    directory="word_language_model",
    argv=("main.py", "--data", "./standin", "--epochs", "2", "--log-interval", "20"),
    tuned_argv=("main.py", "--data", "./standin"),
    stand_in=partial(write_word_corpus, words=110_000, vocabulary=10_000),
    tuned_stand_in=partial(write_word_corpus, words=2_100_000, vocabulary=33_000),
    time_patterns=(r"ms/batch +[\d.]+", r"time: +[\d.]+s"),
    artifacts=("model.pt",),
)

VAE = PublicScript(
    name="vae",
    repository="pytorch/examples",
    directory="vae",
    argv=("main.py", "--epochs", "5"),
    tuned_argv=("main.py",),
    env=STAND_IN_PACKAGES,
    artifacts=("results/sample_5.png", "results/reconstruction_5.png"),
)

MNIST = PublicScript(
    name="mnist",
    repository="pytorch/examples",
    directory="mnist",
    argv=("main.py", "--epochs", "1", "--save-model"),
    tuned_argv=("main.py",),
    env=STAND_IN_PACKAGES,
    artifacts=("mnist_cnn.pt",),
)

MINGPT_ADDER = PublicScript(
    name="mingpt_adder",
    repository="karpathy/minGPT",
    directory="projects/adder",
    argv=("adder.py", "--trainer.max_iters=2000"),
    tuned_argv=("adder.py",),  # endless
    env={"PYTHONPATH": "{checkout}"},
    time_patterns=(r"iter_dt [\d.]+ms",),
    artifacts=("out/adder/model.pt",),
    goal=1.3,
)

NANOGPT = PublicScript(
    name="nanogpt",
    repository="karpathy/nanoGPT",
    directory=".",
    argv=(
        *("train.py", "config/train_shakespeare_char.py", "--device=cpu", "--compile=False", "--eval_iters=20"),
        *("--log_interval=1", "--block_size=64", "--batch_size=12", "--n_layer=4", "--n_head=4", "--n_embd=128"),
        *("--max_iters=1000", "--lr_decay_iters=1000", "--dropout=0.0"),
    ),
    tuned_argv=(
        *("train.py", "config/train_shakespeare_char.py", "--device=cpu", "--compile=False", "--eval_iters=20"),
        *("--log_interval=1", "--block_size=64", "--batch_size=12", "--n_layer=4", "--n_head=4", "--n_embd=128"),
        *("--max_iters=20000", "--lr_decay_iters=20000", "--dropout=0.0"),
    ),
    stand_in=write_characters,
    time_patterns=(r"time [\d.]+ms, mfu -?[\d.]+%",),
    artifacts=("out-shakespeare-char/ckpt.pt",),
)

MAKEMORE = PublicScript(
    name="makemore",
    repository="karpathy/makemore",
    directory=".",
    argv=("makemore.py", "-i", "names.txt", "-o", "names", "--max-steps", "1500"),
    tuned_argv=("makemore.py", "-i", "names.txt", "-o", "names"),  # endless
    time_patterns=(r"step time [\d.]+ms",),
    artifacts=("names/model.pt",),
    packages=("tensorboard",),
    goal=1.6,
)

YUNJEY_LANGUAGE_MODEL = PublicScript(
    name="yunjey_language_model",
    repository="yunjey/pytorch-tutorial",
    directory="tutorials/02-intermediate/language_model",
    argv=("main.py",),
    stand_in=partial(write_treebank, words=30_000),
    tuned_stand_in=partial(write_treebank, words=930_000),
    artifacts=("model.ckpt", "sample.txt"),
    seeded=False,
    goal=1.9,
)

YUNJEY_RESNET = PublicScript(
    name="yunjey_resnet",
    repository="yunjey/pytorch-tutorial",
    directory="tutorials/02-intermediate/deep_residual_network",
    argv=("main.py",),
    env={**STAND_IN_PACKAGES, "STANDIN_TRAIN_SAMPLES": "500", "STANDIN_TEST_SAMPLES": "500"},
    tuned_env=STAND_IN_PACKAGES,
    artifacts=("resnet.ckpt",),
    seeded=False,
    goal=2.3,
)

TINY_DIFFUSION = PublicScript(
    name="tiny_diffusion",
    repository="tanelp/tiny-diffusion",
    directory=".",
    argv=("ddpm.py", "--num_epochs", "30", "--save_images_step", "10"),
    tuned_argv=("ddpm.py",),
    env={"MPLBACKEND": "Agg"},
    artifacts=("exps/base/model.pth", "exps/base/loss.npy"),
    seeded=False,
    packages=("matplotlib", "pandas", "scikit-learn", "tqdm"),
)

DLRM_MODEL = (
    *("dlrm_s_pytorch.py", "--mini-batch-size=256", "--arch-sparse-feature-size=64", "--arch-mlp-bot=512-512-64"),
    *("--arch-mlp-top=1024-1024-1024-1", "--arch-embedding-size=" + "-".join(["100000"] * 8)),
    *("--num-indices-per-lookup=20", "--print-freq=10", "--print-time"),
)

DLRM = PublicScript(
    name="dlrm",
    repository="facebookresearch/dlrm",
    directory=".",
    argv=(*DLRM_MODEL, "--num-batches=300"),
    tuned_argv=(*DLRM_MODEL, "--num-batches=10000"),
    time_patterns=(r"[\d.]+ ms/it",),
    packages=("scikit-learn", "tensorboard"),
)

CLASSIC_LOOP = PublicScript(
    name="classic_loop",
    repository=OWN_EXAMPLES,
    directory="examples",
    argv=("classic_loop.py", "--epochs", "40"),
    tuned_argv=("classic_loop.py", "--epochs", "200"),
    goal=1.6,
)

PUBLIC_SCRIPTS: tuple[PublicScript, ...] = (
    WORD_LANGUAGE_MODEL,
    VAE,
    MNIST,
    MINGPT_ADDER,
    NANOGPT,
    MAKEMORE,
    YUNJEY_LANGUAGE_MODEL,
    YUNJEY_RESNET,
    TINY_DIFFUSION,
    DLRM,
    CLASSIC_LOOP,
)


def _tutorial(part: str, name: str) -> PublicScript:
    return PublicScript(
        name=f"yunjey_{name}",
        repository="yunjey/pytorch-tutorial",
        directory=f"tutorials/{part}/{name}",
        argv=("main.py",),
        env=STAND_IN_PACKAGES,
        seeded=False,
    )


def write_input(directory: Path) -> None:
    """The text that minGPT's chargpt reads, a million characters."""
    text.write_lines(directory / "input.txt", text.lines_of_words(200_000))


MORE_SCRIPTS: tuple[PublicScript, ...] = (
    _tutorial("01-basics", "logistic_regression"),
    _tutorial("01-basics", "feedforward_neural_network"),
    _tutorial("02-intermediate", "convolutional_neural_network"),
    _tutorial("02-intermediate", "recurrent_neural_network"),
    _tutorial("02-intermediate", "bidirectional_recurrent_neural_network"),
    _tutorial("03-advanced", "generative_adversarial_network"),
    _tutorial("03-advanced", "variational_autoencoder"),
    PublicScript(
        name="mnist_rnn",
        repository="pytorch/examples",
        directory="mnist_rnn",
        argv=("main.py",),
        env=STAND_IN_PACKAGES,
    ),
    PublicScript(
        name="mingpt_chargpt",
        repository="karpathy/minGPT",
        directory="projects/chargpt",
        argv=("chargpt.py",),
        env={"PYTHONPATH": "{checkout}"},
        stand_in=write_input,
    ),
    PublicScript(
        name="nanogpt_wide",
        repository="karpathy/nanoGPT",
        directory=".",
        argv=(
            *("train.py", "config/train_shakespeare_char.py", "--device=cpu", "--compile=False", "--eval_iters=1"),
            *("--batch_size=16", "--eval_interval=100000"),
        ),
        stand_in=write_characters,
    ),
)
"""Public scripts by which the search alone is judged: most need no data beyond what stands in for it."""
