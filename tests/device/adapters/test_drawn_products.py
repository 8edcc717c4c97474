"""Low-rank products of the kernels' own sources at random shapes, run by the SIMT machine, against numpy."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from twofold._core.device import AdaptedRows
from twofold.device.adapters.factors import FactorBytes, FactorTable, moved
from twofold.device.adapters.products import Products

from tests.device.fake_device import FakeDevice
from tests.device.random_layers import CPU


@settings(
    max_examples=25, derandomize=True, deadline=None, phases=[Phase.generate],
    suppress_health_check=list(HealthCheck), database=None,
)  # fmt: skip
@given(data=st.data())
def test_rows_get_the_products_of_their_own_adapters(fake: ModuleType, data: st.DataObject) -> None:
    num_tokens, per_token = (
        data.draw(st.integers(1, 12), "tokens"),
        data.draw(st.integers(1, 4), "rows of one"),
    )
    num_parts, entries = data.draw(st.integers(1, 3), "parts"), data.draw(st.integers(1, 5), "entries")
    columns, rows = (
        data.draw(st.integers(1, 300), "columns"),
        data.draw(st.integers(1, 300), "rows of a part"),
    )
    most, is_f32 = data.draw(st.integers(1, 40), "max_rank"), data.draw(st.booleans(), "f32")
    random = np.random.default_rng(data.draw(st.integers(0, 999), "seed"))
    num_rows, dtype = num_tokens * per_token, torch.float32 if is_f32 else torch.bfloat16
    uses = random.integers(-1, 3, num_tokens).astype(np.int32)
    of_row = random.integers(0, entries, (num_tokens, per_token)).astype(np.int32)
    x = torch.from_numpy(random.standard_normal((num_rows, columns), np.float32)).to(dtype)
    y = torch.from_numpy(random.standard_normal((num_rows, num_parts * rows), np.float32)).to(dtype)
    table, bytes_of = FactorTable((1, 3, entries, num_parts), most, CPU), FactorBytes()
    expected, kept = y.float().numpy().copy(), []
    for number in range(3):
        factors = table.empty()
        for entry in range(entries):
            for part in range(num_parts):
                rank = int(random.integers(0, most + 1))
                if rank == 0:
                    continue
                a, b = (random.standard_normal((rank, size), np.float32) for size in (columns, rows))
                factors[0, entry, part] = bytes_of.factors(a, b, part * rows)
                own = (np.repeat(uses, per_token) == number) & (of_row.reshape(-1) == entry)
                expected[own, part * rows : (part + 1) * rows] += (x[own].float().numpy() @ a.T) @ b
        kept.append(factors)
    memory = bytes_of.on(CPU)
    for number, factors in enumerate(kept):
        table.put(number, moved(factors, memory.data_ptr()))
    adapters, ids = torch.from_numpy(uses), torch.from_numpy(of_row)
    native = AdaptedRows(adapters=adapters, entries=ids, num_tokens=num_tokens, per_token=per_token)
    unused = np.repeat(uses, per_token) < 0
    before = y.clone()
    Products(FakeDevice(fake.open_device())).add(table.native(), num_parts * most, native, x, y)
    assert torch.equal(y[torch.from_numpy(unused)], before[torch.from_numpy(unused)])
    room = (1e-4 if is_f32 else 1e-2) * max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(y.float().numpy(), expected, rtol=0, atol=room)
