// libFuzzer on pickles of any bytes: the first one says from how many items a list is a column.

#include <cstdlib>
#include <cstring>
#include <memory>

#include "../../zeroelastic.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    if (size == 0) return 0;
    const size_t nbytes = size - 1;
    // Exactly as long as the pickle, so that the sanitizer sees every byte beyond.
    const std::unique_ptr<uint8_t[]> pickle(new uint8_t[nbytes]), room(new uint8_t[nbytes]);
    std::memcpy(pickle.get(), data + 1, nbytes);
    ze_packed packed{};
    packed.pickle = room.get();
    ze_error error{};
    const int32_t code =
        ze_pack_pickle(pickle.get(), static_cast<int64_t>(nbytes), data[0] % 8, &packed, &error);
    if (code != ZE_OK && code != ZE_BAD_TABLE) std::abort();
    if (code == ZE_OK && packed.num_bytes > static_cast<int64_t>(nbytes)) std::abort();
    ze_free_packed(&packed);
    return 0;
}
