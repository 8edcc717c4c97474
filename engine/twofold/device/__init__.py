"""The engine on a device: dense layers, decode graphs, sampling, the routed experts of a step, transfers and memory.

In reading order:

    finding         chooses the accelerator and opens the device, once; backend: the door to native modules
    device          the device interface; implemented by cuda_device, and on the host by tests/device/fake_device.py
    checks          a device's self-check against the CPU, before a model is loaded; whether a device is lost
    memory          what a model needs, and how each device's memory is split; loading makes the plan and loads for it
    runner          one scheduled step: as a table step, or placed by the host
    decode_inputs   a decode step's inputs at fixed addresses; graphs captures such a step for each batch size
    queue           the stream that steps go to, and the worker that launches
    model           dense layers in torch; kernels: operations torch lacks, in plain torch; native_kernels: our own
    sampler         the next tokens, inside the step
    layouts         experts as kernels see them: panels, slots, pairs by expert
    table_layers    experts of a table step, placed by the device; cache_prior: its routing bias
    placed_layers   experts of a step that the host places; placed_share: one device's part of them, and
                    arrays copied to the device together
    probe           times single operations; calibration fits the cost model's constants to them

Kernel arguments are the frozen structs of `twofold._core.device`; `backend.NativeDevice` launches the kernels.
"""
