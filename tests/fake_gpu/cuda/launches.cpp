// Kernels. Their names are known, because torch registers them. A launch only logs the kernel.
#include "fake.h"

#include <cstring>
#include <unordered_map>

namespace {

struct Configuration {
  dim3 grid, block;
  size_t shared_bytes;
  cudaStream_t stream;
};

thread_local Configuration pushed;  // set by the code that nvcc generates for kernel<<<...>>>()

std::unordered_map<const void *, const char *> &names() {
  static auto *all = new std::unordered_map<const void *, const char *>;
  return *all;
}

int blocks_per_multiprocessor(int threads) { return threads > 512 ? 2 : 4; }

}  // namespace

namespace fake {

void name_kernel(const void *function, const char *name) {
  std::lock_guard lock(mutex());
  names()[function] = name;
}

void launch(const void *function, dim3 grid, dim3 block, size_t shared_bytes, const void *stream) {
  if (!is_logging()) return;
  std::lock_guard lock(mutex());
  const auto found = names().find(function);
  log("launch", "%s\t%u,%u,%u\t%u,%u,%u\t%zu\t%p", found == names().end() ? "?" : found->second,
      grid.x, grid.y, grid.z, block.x, block.y, block.z, shared_bytes, stream);
}

}  // namespace fake

// ---- what nvcc's code calls ------------------------------------------------------------------

EXPORT void **__cudaRegisterFatBinary(void *) { return (void **)fake::new_handle(); }
EXPORT void __cudaRegisterFatBinaryEnd(void **) {}
EXPORT void __cudaUnregisterFatBinary(void **) {}
EXPORT void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int) {}

EXPORT void __cudaRegisterFunction(void **, const char *function, char *, const char *name, int,
                                   uint3 *, uint3 *, dim3 *, dim3 *, int *) {
  fake::name_kernel(function, name);
}

EXPORT unsigned __cudaPushCallConfiguration(
    dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream) {
  pushed = {grid, block, shared_bytes, stream};
  return 0;
}

EXPORT cudaError_t __cudaPopCallConfiguration(
    dim3 *grid, dim3 *block, size_t *shared_bytes, void *stream) {
  *grid = pushed.grid;
  *block = pushed.block;
  *shared_bytes = pushed.shared_bytes;
  *(cudaStream_t *)stream = pushed.stream;
  return cudaSuccess;
}

EXPORT cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}

EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **,
                                      size_t shared_bytes, cudaStream_t stream) {
  fake::launch(kernel, grid, block, shared_bytes, stream);
  return cudaSuccess;
}

// ---- runtime ---------------------------------------------------------------------------------

EXPORT cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **,
                                    size_t shared_bytes, cudaStream_t stream) {
  fake::launch(function, grid, block, shared_bytes, stream);
  return cudaSuccess;
}

EXPORT cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block, void **,
                                               size_t shared_bytes, cudaStream_t stream) {
  fake::launch(function, grid, block, shared_bytes, stream);
  return cudaSuccess;
}

EXPORT cudaError_t cudaLaunchKernelExC(
    const cudaLaunchConfig_t *config, const void *function, void **) {
  fake::launch(
      function, config->gridDim, config->blockDim, config->dynamicSmemBytes, config->stream);
  return cudaSuccess;
}

EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *) {
  *attributes = {};
  attributes->numRegs = 64;
  attributes->maxThreadsPerBlock = 1024;
  attributes->maxDynamicSharedSizeBytes = 48 << 10;
  attributes->ptxVersion = attributes->binaryVersion = 90;
  return cudaSuccess;
}

EXPORT cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute, int) {
  return cudaSuccess;
}

EXPORT cudaError_t cudaKernelSetAttributeForDevice(
    cudaKernel_t, cudaFuncAttribute, int, int) {
  return cudaSuccess;
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(
    int *blocks, const void *, int threads, size_t) {
  *blocks = blocks_per_multiprocessor(threads);
  return cudaSuccess;
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int *blocks, const void *, int threads, size_t, unsigned) {
  *blocks = blocks_per_multiprocessor(threads);
  return cudaSuccess;
}

EXPORT cudaError_t cudaGetSymbolAddress(void **address, const void *) {
  static char all_symbols[1 << 20];
  *address = all_symbols;
  return cudaSuccess;
}

// ---- driver: the kernels of Triton -----------------------------------------------------------

EXPORT CUresult cuModuleLoadData(CUmodule *module, const void *) {
  *module = (CUmodule)fake::new_handle();
  return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleLoadDataEx(
    CUmodule *module, const void *data, unsigned, CUjit_option *, void **) {
  return cuModuleLoadData(module, data);
}

EXPORT CUresult cuModuleLoad(CUmodule *module, const char *) {
  return cuModuleLoadData(module, nullptr);
}

EXPORT CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }

EXPORT CUresult cuModuleGetFunction(CUfunction *function, CUmodule, const char *name) {
  *function = (CUfunction)fake::new_handle();
  fake::name_kernel(*function, strdup(name));  // kept for the life of the process
  return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction) {
  switch (attribute) {
    case CU_FUNC_ATTRIBUTE_NUM_REGS:
      *value = 64;
      break;
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
      *value = 1024;
      break;
    default:
      *value = 0;
  }
  return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
EXPORT CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }

EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **, void **) {
  fake::launch(function, dim3(config->gridDimX, config->gridDimY, config->gridDimZ),
               dim3(config->blockDimX, config->blockDimY, config->blockDimZ),
               config->sharedMemBytes, config->hStream);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y,
                               unsigned grid_z, unsigned block_x, unsigned block_y,
                               unsigned block_z, unsigned shared_bytes, CUstream stream, void **,
                               void **) {
  fake::launch(function, dim3(grid_x, grid_y, grid_z), dim3(block_x, block_y, block_z),
               shared_bytes, stream);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(
    int *blocks, CUfunction, int threads, size_t) {
  *blocks = blocks_per_multiprocessor(threads);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction, const CUlaunchConfig *) {
  *clusters = 8;
  return CUDA_SUCCESS;
}
