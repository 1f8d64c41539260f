// The driver's contexts, and how torch and Triton find the driver's functions.
#include "fake.h"

#include <dlfcn.h>
#include <string>

namespace {

const CUcontext CONTEXT = (CUcontext)1;

CUresult not_supported() { return CUDA_ERROR_NOT_SUPPORTED; }

// The newest version of a function has the suffix _v2. Functions for features that the fake GPU
// lacks (multicast, green contexts) are found, but fail when they are called.
void *find_function(const char *name) {
  const std::string newest = std::string(name) + "_v2";
  for (const char *each : {newest.c_str(), name})
    if (void *found = dlsym(RTLD_DEFAULT, each)) return found;
  return (void *)not_supported;
}

}  // namespace

EXPORT CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = CONTEXT;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
EXPORT CUresult cuCtxPushCurrent(CUcontext) { return CUDA_SUCCESS; }

EXPORT CUresult cuCtxPopCurrent(CUcontext *context) {
  if (context) *context = CONTEXT;
  return CUDA_SUCCESS;
}

// Triton sets the size of the buffer for `printf`.
EXPORT CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }

EXPORT CUresult cuCtxGetLimit(size_t *value, CUlimit) {
  *value = 1 << 20;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetDevice(CUdevice *device) {
  *device = fake::current_device();
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice) {
  return cuCtxGetCurrent(context);
}

EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned *flags, int *is_active) {
  *flags = 0;
  *is_active = 1;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "error of the fake GPU";
  return CUDA_SUCCESS;
}

EXPORT CUresult cuGetProcAddress(const char *name, void **function, int, cuuint64_t,
                                 CUdriverProcAddressQueryResult *result) {
  *function = find_function(name);
  if (result) *result = CU_GET_PROC_ADDRESS_SUCCESS;
  return CUDA_SUCCESS;
}

EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned,
                                                    unsigned long long,
                                                    cudaDriverEntryPointQueryResult *result) {
  *function = find_function(name);
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
