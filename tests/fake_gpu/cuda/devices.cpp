// Devices. Each device is an H100 SXM. The environment sets the number of devices, and
// `fake_gpu_set_memory` sets their memory.
#include "fake.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

constexpr const char *NAME = "NVIDIA H100 80GB HBM3";
constexpr int CUDA_VERSION_NUMBER = 13020;

struct Attribute {
  cudaDeviceAttr number;
  int value;
};

// From cudaDeviceProp of an H100 SXM (CUDA programming guide, table of compute capability 9.0).
constexpr Attribute ATTRIBUTES[] = {
    {cudaDevAttrMaxThreadsPerBlock, 1024},
    {cudaDevAttrMaxBlockDimX, 1024},
    {cudaDevAttrMaxBlockDimY, 1024},
    {cudaDevAttrMaxBlockDimZ, 64},
    {cudaDevAttrMaxGridDimX, 2147483647},
    {cudaDevAttrMaxGridDimY, 65535},
    {cudaDevAttrMaxGridDimZ, 65535},
    {cudaDevAttrMaxSharedMemoryPerBlock, 48 << 10},
    {cudaDevAttrMaxSharedMemoryPerBlockOptin, 227 << 10},
    {cudaDevAttrMaxSharedMemoryPerMultiprocessor, 228 << 10},
    {cudaDevAttrReservedSharedMemoryPerBlock, 1 << 10},
    {cudaDevAttrTotalConstantMemory, 64 << 10},
    {cudaDevAttrWarpSize, 32},
    {cudaDevAttrMaxPitch, 2147483647},
    {cudaDevAttrMaxRegistersPerBlock, 65536},
    {cudaDevAttrMaxRegistersPerMultiprocessor, 65536},
    {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
    {cudaDevAttrMaxBlocksPerMultiprocessor, 32},
    {cudaDevAttrMultiProcessorCount, 132},
    {cudaDevAttrClockRate, 1980000},
    {cudaDevAttrMemoryClockRate, 2619000},
    {cudaDevAttrGlobalMemoryBusWidth, 5120},
    {cudaDevAttrL2CacheSize, 50 << 20},
    {cudaDevAttrTextureAlignment, 512},
    {cudaDevAttrConcurrentKernels, 1},
    {cudaDevAttrAsyncEngineCount, 3},
    {cudaDevAttrUnifiedAddressing, 1},
    {cudaDevAttrComputeCapabilityMajor, 9},
    {cudaDevAttrComputeCapabilityMinor, 0},
    {cudaDevAttrStreamPrioritiesSupported, 1},
    {cudaDevAttrCanMapHostMemory, 1},
    {cudaDevAttrCooperativeLaunch, 1},
    {cudaDevAttrHostRegisterSupported, 1},
    {cudaDevAttrMemoryPoolsSupported, 1},
    {(cudaDeviceAttr)CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1},
    {(cudaDeviceAttr)CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 1},
};

int device = 0;
size_t bytes = 0;

int number_of_devices() {
  const char *all = getenv("FAKE_GPU_COUNT");
  const int most = all ? atoi(all) : 1;
  const char *visible = getenv("CUDA_VISIBLE_DEVICES");
  if (!visible) return most;
  if (!*visible || !strcmp(visible, "-1")) return 0;
  return std::min<int>(most, 1 + std::count(visible, visible + strlen(visible), ','));
}

}  // namespace

namespace fake {

size_t total_bytes() { return bytes ? bytes : (size_t)79 << 30; }
int current_device() { return device; }

int device_attribute(int number) {
  for (const Attribute &each : ATTRIBUTES)
    if ((int)each.number == number) return each.value;
  return 0;
}

}  // namespace fake

EXPORT void fake_gpu_set_memory(size_t new_bytes) { bytes = new_bytes; }

// ---- runtime ---------------------------------------------------------------------------------

EXPORT cudaError_t cudaGetDeviceCount(int *count) {
  *count = number_of_devices();
  return *count ? cudaSuccess : cudaErrorNoDevice;
}

EXPORT cudaError_t cudaGetDevice(int *current) {
  *current = device;
  return cudaSuccess;
}

EXPORT cudaError_t cudaSetDevice(int wanted) {
  device = wanted;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int) {
  *value = fake::device_attribute(attribute);
  return cudaSuccess;
}

EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int number) {
  *properties = {};
  strcpy(properties->name, NAME);
  properties->uuid.bytes[0] = (char)(number + 1);
  properties->pciDeviceID = number + 1;
  properties->totalGlobalMem = fake::total_bytes();
  const auto value = [](cudaDeviceAttr attribute) { return fake::device_attribute(attribute); };
  properties->major = value(cudaDevAttrComputeCapabilityMajor);
  properties->minor = value(cudaDevAttrComputeCapabilityMinor);
  properties->multiProcessorCount = value(cudaDevAttrMultiProcessorCount);
  properties->warpSize = value(cudaDevAttrWarpSize);
  properties->l2CacheSize = value(cudaDevAttrL2CacheSize);
  properties->memoryBusWidth = value(cudaDevAttrGlobalMemoryBusWidth);
  properties->regsPerBlock = value(cudaDevAttrMaxRegistersPerBlock);
  properties->regsPerMultiprocessor = value(cudaDevAttrMaxRegistersPerMultiprocessor);
  properties->maxThreadsPerBlock = value(cudaDevAttrMaxThreadsPerBlock);
  properties->maxThreadsPerMultiProcessor = value(cudaDevAttrMaxThreadsPerMultiProcessor);
  properties->maxBlocksPerMultiProcessor = value(cudaDevAttrMaxBlocksPerMultiprocessor);
  properties->maxThreadsDim[0] = value(cudaDevAttrMaxBlockDimX);
  properties->maxThreadsDim[1] = value(cudaDevAttrMaxBlockDimY);
  properties->maxThreadsDim[2] = value(cudaDevAttrMaxBlockDimZ);
  properties->maxGridSize[0] = value(cudaDevAttrMaxGridDimX);
  properties->maxGridSize[1] = value(cudaDevAttrMaxGridDimY);
  properties->maxGridSize[2] = value(cudaDevAttrMaxGridDimZ);
  properties->sharedMemPerBlock = value(cudaDevAttrMaxSharedMemoryPerBlock);
  properties->sharedMemPerBlockOptin = value(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  properties->sharedMemPerMultiprocessor = value(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  properties->totalConstMem = value(cudaDevAttrTotalConstantMemory);
  properties->textureAlignment = value(cudaDevAttrTextureAlignment);
  properties->concurrentKernels = value(cudaDevAttrConcurrentKernels);
  properties->asyncEngineCount = value(cudaDevAttrAsyncEngineCount);
  properties->unifiedAddressing = value(cudaDevAttrUnifiedAddressing);
  properties->cooperativeLaunch = value(cudaDevAttrCooperativeLaunch);
  properties->canMapHostMemory = value(cudaDevAttrCanMapHostMemory);
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceCanAccessPeer(int *can, int, int) {
  *can = 0;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int number) {
  snprintf(text, length, "0000:%02x:00.0", number + 1);
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDriverGetVersion(int *version) {
  *version = CUDA_VERSION_NUMBER;
  return cudaSuccess;
}

EXPORT cudaError_t cudaRuntimeGetVersion(int *version) {
  *version = CUDA_VERSION_NUMBER;
  return cudaSuccess;
}

EXPORT cudaError_t cudaGetLastError() { return cudaSuccess; }
EXPORT cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
EXPORT cudaError_t cudaProfilerStart() { return cudaSuccess; }
EXPORT cudaError_t cudaProfilerStop() { return cudaSuccess; }

EXPORT const char *cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaError";
}

EXPORT const char *cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "out of memory" : "error of the fake GPU";
}

// ---- driver ----------------------------------------------------------------------------------

EXPORT CUresult cuInit(unsigned) { return CUDA_SUCCESS; }

EXPORT CUresult cuDriverGetVersion(int *version) {
  *version = CUDA_VERSION_NUMBER;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetCount(int *count) {
  *count = number_of_devices();
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGet(CUdevice *handle, int number) {
  *handle = number;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetName(char *text, int length, CUdevice) {
  snprintf(text, length, "%s", NAME);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice) {
  *value = fake::device_attribute(attribute);  // both interfaces number attributes alike
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceTotalMem(size_t *total, CUdevice) {
  *total = fake::total_bytes();
  return CUDA_SUCCESS;
}
