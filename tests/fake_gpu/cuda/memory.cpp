// Memory. The device's memory is host memory that is never touched, so it takes no space.
#include "fake.h"

#include <map>
#include <sys/mman.h>

namespace {

struct Range {
  size_t bytes;
  fake::Place place;
};

constexpr size_t GRANULARITY = 2 << 20;  // as on NVIDIA's GPUs
constexpr size_t CONTEXT_BYTES = 500 << 20;
size_t used_bytes = CONTEXT_BYTES;

std::map<uintptr_t, Range> &ranges() {
  static auto *all = new std::map<uintptr_t, Range>;
  return *all;
}

std::map<uintptr_t, Range>::iterator find(const void *address) {
  const auto after = ranges().upper_bound((uintptr_t)address);
  if (after == ranges().begin()) return ranges().end();
  const auto found = std::prev(after);
  return (uintptr_t)address < found->first + found->second.bytes ? found : ranges().end();
}

size_t round_up(size_t bytes) { return (bytes + GRANULARITY - 1) / GRANULARITY * GRANULARITY; }

void *map_range(size_t bytes, fake::Place place) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void *address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (address == MAP_FAILED) return nullptr;
  std::lock_guard lock(fake::mutex());
  ranges()[(uintptr_t)address] = {bytes, place};
  return address;
}

bool unmap_range(void *address, fake::Place place) {
  std::lock_guard lock(fake::mutex());
  const auto found = ranges().find((uintptr_t)address);
  if (found == ranges().end() || found->second.place != place) return false;
  munmap(address, found->second.bytes);
  if (place == fake::Place::device) fake::release(found->second.bytes);
  ranges().erase(found);
  return true;
}

}  // namespace

namespace fake {

Place place_of(const void *address) {
  std::lock_guard lock(mutex());
  const auto found = find(address);
  return found == ranges().end() ? Place::pageable : found->second.place;
}

bool charge(size_t bytes) {
  std::lock_guard lock(mutex());
  if (used_bytes + bytes > total_bytes()) return false;
  used_bytes += bytes;
  return true;
}

void release(size_t bytes) {
  std::lock_guard lock(mutex());
  used_bytes -= bytes;
}

}  // namespace fake

// ---- runtime ---------------------------------------------------------------------------------

EXPORT cudaError_t cudaMalloc(void **address, size_t bytes) {
  bytes = round_up(bytes);
  *address = nullptr;
  if (!fake::charge(bytes)) return cudaErrorMemoryAllocation;
  *address = map_range(bytes, fake::Place::device);
  fake::log("malloc", "%zu", bytes);
  return *address ? cudaSuccess : cudaErrorMemoryAllocation;
}

EXPORT cudaError_t cudaFree(void *address) {
  if (!address || unmap_range(address, fake::Place::device)) return cudaSuccess;
  return cudaErrorInvalidValue;
}

EXPORT cudaError_t cudaHostAlloc(void **address, size_t bytes, unsigned) {
  *address = map_range(round_up(bytes), fake::Place::page_locked);
  fake::log_stack("host allocation", "cudaHostAlloc");
  return *address ? cudaSuccess : cudaErrorMemoryAllocation;
}

EXPORT cudaError_t cudaFreeHost(void *address) {
  return unmap_range(address, fake::Place::page_locked) ? cudaSuccess : cudaErrorInvalidValue;
}

EXPORT cudaError_t cudaHostRegister(void *address, size_t bytes, unsigned) {
  std::lock_guard lock(fake::mutex());
  ranges()[(uintptr_t)address] = {bytes, fake::Place::page_locked};
  fake::log_stack("host allocation", "cudaHostRegister");
  return cudaSuccess;
}

EXPORT cudaError_t cudaHostUnregister(void *address) {
  std::lock_guard lock(fake::mutex());
  return ranges().erase((uintptr_t)address) ? cudaSuccess : cudaErrorHostMemoryNotRegistered;
}

EXPORT cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
  std::lock_guard lock(fake::mutex());
  *total = fake::total_bytes();
  *free = *total - used_bytes;
  return cudaSuccess;
}

EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *address) {
  *attributes = {};
  void *const pointer = const_cast<void *>(address);
  switch (fake::place_of(address)) {
    case fake::Place::device:
      attributes->type = cudaMemoryTypeDevice;
      attributes->devicePointer = pointer;
      break;
    case fake::Place::page_locked:
      attributes->type = cudaMemoryTypeHost;
      attributes->devicePointer = attributes->hostPointer = pointer;
      break;
    case fake::Place::pageable:
      attributes->type = cudaMemoryTypeUnregistered;
      attributes->device = cudaInvalidDeviceId;
  }
  return cudaSuccess;
}

// ---- driver: addresses that are reserved first and get memory later, as torch's expandable
// ---- segments do ------------------------------------------------------------------------------

EXPORT CUresult cuMemGetAllocationGranularity(
    size_t *bytes, const CUmemAllocationProp *, CUmemAllocationGranularity_flags) {
  *bytes = GRANULARITY;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAddressReserve(
    CUdeviceptr *address, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  *address = (CUdeviceptr)map_range(bytes, fake::Place::device);
  return *address ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
  std::lock_guard lock(fake::mutex());
  munmap((void *)address, bytes);
  ranges().erase((uintptr_t)address);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes,
                            const CUmemAllocationProp *, unsigned long long) {
  if (!fake::charge(bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = bytes;  // the size is all that `cuMemRelease` needs
  fake::log("malloc", "%zu", bytes);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  fake::release(handle);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemMap(
    CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long) {
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemUnmap(CUdeviceptr, size_t) { return CUDA_SUCCESS; }

EXPORT CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t) {
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemGetAddressRange(CUdeviceptr *base, size_t *bytes, CUdeviceptr address) {
  std::lock_guard lock(fake::mutex());
  const auto found = find((void *)address);
  if (found == ranges().end()) return CUDA_ERROR_INVALID_VALUE;
  if (base) *base = found->first;
  if (bytes) *bytes = found->second.bytes;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuPointerGetAttribute(
    void *value, CUpointer_attribute attribute, CUdeviceptr address) {
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:  // Triton asks whether an argument is on the device
      if (fake::place_of((void *)address) == fake::Place::pageable) return CUDA_ERROR_INVALID_VALUE;
      *(CUdeviceptr *)value = address;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      *(int *)value = fake::current_device();
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_NOT_SUPPORTED;
  }
}
