"""The engine on a device: dense layers, decode graphs, sampling, the routed experts of a step, transfers and memory.

In reading order:

    finding         which accelerator, and the device behind it, once
    device          what is asked of a device; answered by cuda_device, and on the host by tests/device/fake_device.py
    budget          how the device's memory is split; loading makes the plan and loads for it
    runner          one scheduled step: as a table step, or placed by the host
    decode_inputs   a decode step's inputs at fixed addresses; graphs captures such a step for each batch size
    queue           the stream that steps go to, and the worker that launches
    model           dense layers in torch; kernels what torch has no primitive for, cuda_kernels ours
    sampler         the next tokens, inside the step
    layouts         experts as kernels see them: panels, slots, pairs by expert
    table_layers    experts of a table step, which the device places; experts.py the same with slots that never change
    placed_layers   experts of a step that the host places; transfers what crosses for each layer
    probe           times single things; calibration fits the cost model's figures to them

What kernels are told are the frozen structs of `twofold._core.device`; who launches is `twofold._cuda.Device`.
"""
