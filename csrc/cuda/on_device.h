// A device that is current for a while.

#ifndef ZEROELASTIC_CUDA_ON_DEVICE_H_
#define ZEROELASTIC_CUDA_ON_DEVICE_H_

#include <cuda_runtime_api.h>

namespace zeroelastic {

// The caller's device is current again afterwards.
class OnDevice {
  public:
    explicit OnDevice(int device) {
        status_ = cudaGetDevice(&before_);
        if (status_ == cudaSuccess) status_ = cudaSetDevice(device);
    }
    ~OnDevice() {
        if (before_ >= 0) cudaSetDevice(before_);
    }
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;

    cudaError_t status() const {
        return status_;
    }

  private:
    int before_ = -1;
    cudaError_t status_;
};

}  // namespace zeroelastic

#endif  // ZEROELASTIC_CUDA_ON_DEVICE_H_
