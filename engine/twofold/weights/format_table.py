"""Made by tests/kernels/format_table.py from the headers of the formats; fields as in FormatLayout."""

from typing import Final

TABLE: Final[tuple[tuple[str, int, int, int, int, int, int, str, bool], ...]] = (
    ("f32", 1, 4, 1, 128, 0, 0, "F32", True),
    ("f16", 1, 2, 2, 128, 0, 0, "F16", True),
    ("bf16", 1, 2, 2, 128, 0, 0, "BF16", True),
    ("fp8", 1, 1, 128, 4224, 128, 0, "", False),
    ("q8_0", 32, 34, 32, 1088, 0, 0, "Q8_0", True),
    ("q4_0", 32, 18, 32, 576, 0, 0, "Q4_0", True),
    ("q4_k", 256, 144, 256, 4736, 0, 0, "Q4_K", True),
    ("q5_k", 256, 176, 256, 5760, 0, 0, "Q5_K", True),
    ("q6_k", 256, 210, 256, 6720, 0, 0, "Q6_K", True),
    ("int8", 128, 130, 128, 4160, 0, 0, "", True),
    ("int4", 64, 36, 64, 1152, 0, 0, "", True),
    ("int8_channel", 32, 32, 128, 4160, 0, 2, "", True),
    ("int4_channel", 32, 16, 32, 576, 0, 2, "", True),
    ("mxfp4", 32, 17, 64, 1088, 0, 0, "MXFP4", True),
    ("iq4_nl", 32, 18, 32, 576, 0, 0, "IQ4_NL", False),
    ("q4_1", 32, 20, 32, 640, 0, 0, "Q4_1", False),
    ("q5_0", 32, 22, 32, 704, 0, 0, "Q5_0", False),
    ("q5_1", 32, 24, 32, 768, 0, 0, "Q5_1", False),
    ("q2_k", 256, 84, 256, 2688, 0, 0, "Q2_K", False),
    ("q3_k", 256, 110, 256, 3648, 0, 0, "Q3_K", False),
    ("iq4_xs", 256, 136, 256, 4416, 0, 0, "IQ4_XS", False),
    ("nvfp4", 64, 36, 256, 4736, 0, 4, "", False),
)
