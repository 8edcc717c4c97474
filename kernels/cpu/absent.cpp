// Stands for the parts of levels that this build leaves out (cmake/Levels.cmake): there are none.
#include "levels.h"

namespace twofold::kernels {

#define TWOFOLD_ABSENT(part) \
  const KernelTable* part() { return nullptr; }

#ifndef TWOFOLD_COMPILED_avx2
TWOFOLD_ABSENT(avx2_level)
TWOFOLD_ABSENT(avx2_integer)
#endif
#ifndef TWOFOLD_COMPILED_avx_vnni
TWOFOLD_ABSENT(avx_vnni_integer)
#endif
#ifndef TWOFOLD_COMPILED_avx512
TWOFOLD_ABSENT(avx512_level)
#endif
#ifndef TWOFOLD_COMPILED_avx512_vnni
TWOFOLD_ABSENT(avx512_vnni_integer)
#endif
#ifndef TWOFOLD_COMPILED_avx512_bf16
TWOFOLD_ABSENT(avx512_bf16_level)
#endif
#ifndef TWOFOLD_COMPILED_amx
TWOFOLD_ABSENT(amx_level)
#endif
#ifndef TWOFOLD_COMPILED_amx_emulated
TWOFOLD_ABSENT(amx_emulated)
#endif

}  // namespace twofold::kernels
