// A pickle of torch.save, followed opcode by opcode, and written again with lists and dictionaries of at
// least `long_list` items as columns.
//
// The reference is Python: zeroelastic/torch_file/safe_unpickler.py says which pickles are in proportion to
// their size. `pack_pickle` takes no pickle that it refuses, and leaves to it whatever else it does not know.

#ifndef ZEROELASTIC_PICKLE_H_
#define ZEROELASTIC_PICKLE_H_

#include <cstdint>

#include "zeroelastic.h"

namespace zeroelastic {

// False where the pickle is not taken; `out` is filled where it is. May throw std::bad_alloc.
bool pack_pickle(const uint8_t* data, int64_t nbytes, int64_t long_list, ze_packed* out);

}  // namespace zeroelastic

#endif  // ZEROELASTIC_PICKLE_H_
