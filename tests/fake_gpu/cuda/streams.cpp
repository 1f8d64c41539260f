// Streams and events. Operations are done as soon as they are queued, so no call has to wait.
#include "fake.h"

namespace {

// The time between any two events. Triton repeats a kernel until enough time has passed. With a
// fixed time, Triton soon stops, and makes the same choice in each session.
constexpr float ELAPSED_MS = 10;

}  // namespace

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned, int) {
  *stream = (cudaStream_t)fake::new_handle();
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamCreate(cudaStream_t *stream) {
  return cudaStreamCreateWithPriority(stream, 0, 0);
}

EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned) {
  return cudaStreamCreateWithPriority(stream, 0, 0);
}

EXPORT cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
EXPORT cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }

EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t, int *priority) {
  *priority = 0;
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  fake::log("stream waits", "%p\t%p", (void *)stream, (void *)event);
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamAddCallback(
    cudaStream_t stream, cudaStreamCallback_t call, void *data, unsigned) {
  call(stream, cudaSuccess, data);
  return cudaSuccess;
}

EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t call, void *data) {
  call(data);
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) {
  *event = (cudaEvent_t)fake::new_handle();
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventCreate(cudaEvent_t *event) {
  return cudaEventCreateWithFlags(event, 0);
}

EXPORT cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }

EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  fake::log("event", "%p\t%p", (void *)event, (void *)stream);
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}

EXPORT cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }

EXPORT cudaError_t cudaEventElapsedTime(float *elapsed_ms, cudaEvent_t, cudaEvent_t) {
  *elapsed_ms = ELAPSED_MS;
  return cudaSuccess;
}
