// NVML is a separate library, because torch loads it by name. torch's wheels have no header for its
// functions, so results are the numbers of nvmlReturn_t.
#include <stdio.h>
#include <string.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3 };

int nvmlInit_v2(void) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int error) { return error ? "not supported" : "success"; }

int nvmlDeviceGetCount_v2(unsigned *count) {
  *count = 1;
  return SUCCESS;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device) {
  *device = (void *)1;
  return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned number, void **device) {
  *device = (void *)1;
  return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *processes) {
  *count = 0;
  return SUCCESS;
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
  *version = 13020;
  return SUCCESS;
}

int nvmlSystemGetDriverVersion(char *text, unsigned length) {
  snprintf(text, length, "580.95.05");
  return SUCCESS;
}

int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, int *type) {
  return NOT_SUPPORTED;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, void *info) {
  return NOT_SUPPORTED;
}

// Leave the structure at 0, which means that the GPU is in no fabric.
int nvmlDeviceGetGpuFabricInfoV(void *device, void *info) { return SUCCESS; }
