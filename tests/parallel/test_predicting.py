"""`predict` with a model of which each rank has a part: all ranks call it together, as often as each other."""

from __future__ import annotations

import pytest

from tests.train.conftest import RunRanks

SHARDED = """
import flatout
from flatout import Plan, TrainStep, predict
from flatout.errors import FlatoutError
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.dropout = nn.Linear(8, 8), nn.Dropout(0.5)
    def forward(self, x):
        return x + self.dropout(self.inner(x).tanh())
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.blocks, self.head = nn.Embedding(11, 8), nn.Sequential(Block(), Block()), nn.Linear(8, 3)
    def forward(self, tokens):
        return self.head(self.blocks(self.embedding(tokens)))
torch.manual_seed(0)
model = Model()
whole = Model()
loss = lambda m, b: m(b).square().mean()
step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), loss, Plan(parallel="fsdp"))
step(torch.zeros(2, 4, dtype=torch.int64))
whole.load_state_dict({name: one.full_tensor() for name, one in model.state_dict().items()})
inputs = [torch.arange(length) % 11 for length in (3, 9, 4, 7, 2, 5)] + [torch.tensor([99, 1])]
*found, failed = predict(model, inputs)
for one, tokens in zip(found, inputs):
    torch.testing.assert_close(one, whole.eval()(tokens))
assert "99" in str(failed), failed
assert [] == [name for name, one in model.named_modules() if not one.training], "modes"
assert [] == [name for name, one in model.named_parameters() if not hasattr(one, "full_tensor")], "parts"
before = float(step(torch.ones(2, 4, dtype=torch.int64)))  # goes on training after a call that failed
assert before == before, before
for plan, words in ((Plan(precision="bf16"), "precision is 'bf16'"), (Plan(compile="default"), "compile is 'default'")):
    try:
        predict(model, inputs, plan)
        raise AssertionError("accepted")
    except FlatoutError as error:
        assert f"the plan's {words}, and the model's weights are sharded" in str(error), error
try:
    predict(model, inputs, device="meta")
    raise AssertionError("accepted")
except FlatoutError as error:
    assert "device is 'meta', and the model's weights are sharded over ranks on cpu" in str(error), error
leave()
"""


def test_a_model_in_fsdp_is_called_where_it_is(run_ranks: RunRanks) -> None:
    assert run_ranks(SHARDED, 2) == [(0, "", "")] * 2


CUT = """
import time
import flatout
from flatout import Plan, TrainStep, predict
torch.manual_seed(0)
sizes = dict(vocab_size=12, max_tokens=32, width=16, heads=2, layers=2, dropout=0.0)
model = flatout.models.TransformerLM(flatout.models.TransformerConfig(**sizes))
whole = flatout.models.TransformerLM(flatout.models.TransformerConfig(**sizes)).eval()
loss = lambda m, b: nn.functional.cross_entropy(m(b).flatten(0, 1), b.flatten())
plan = Plan(parallel=sys.argv[4], micro_batches=2)
step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), loss, plan)
step(torch.zeros(2, 8, dtype=torch.int64))
whole.load_state_dict(model.state_dict())
inputs = [torch.arange(length % 29 + 1) % 12 for length in range(300)]
if rank == 1:  # whose time in batches differs, by which one process decides how many of them are checked
    import flatout.infer.prediction.window_run as place
    original = place.WindowRun._outputs
    def slower(self, *args):
        self.audit.batch_seconds += 1.0
        return original(self, *args)
    place.WindowRun._outputs = slower
for one, tokens in zip(predict(model, inputs, Plan(batch_tokens=32)), inputs):
    torch.testing.assert_close(one, whole(tokens[None])[0], atol=1e-4, rtol=1e-4)
if sys.argv[4] == "pipeline":
    from flatout.infer.prediction.placed import place
    copied = place(model, Plan(precision="bf16")).model
    held = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in copied.parameters()}
    assert sum(held.values()) < 0.8 * 2 * sum(one.numel() for one in whole.parameters())  # not what another rank has
leave()
"""


@pytest.mark.slow
def test_ranks_that_share_layers_check_the_same_batches(run_ranks: RunRanks) -> None:
    assert run_ranks(CUT, 2, "tensor") == [(0, "", "")] * 2


def test_stages_predict_together_and_copy_their_own_weights(run_ranks: RunRanks) -> None:
    assert run_ranks(CUT, 2, "pipeline") == [(0, "", "")] * 2
