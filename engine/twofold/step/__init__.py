"""One engine step: sequences, batch, runner, sampler, capacity, expert loading. Used by `device` and `engine`."""
