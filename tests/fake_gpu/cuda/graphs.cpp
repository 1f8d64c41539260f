// CUDA graphs. Only one stream is captured at a time. A replay is one line in the log.
#include "fake.h"

namespace {

bool is_capturing = false;
cudaStream_t captured_stream;

cudaStreamCaptureStatus status_of(cudaStream_t stream) {
  const bool captured = is_capturing && stream == captured_stream;
  return captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
}

}  // namespace

EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status) {
  *status = status_of(stream);
  return cudaSuccess;
}

EXPORT CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  *status = (CUstreamCaptureStatus)status_of(stream);  // both interfaces use equal numbers
  return CUDA_SUCCESS;
}

EXPORT cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t stream, cudaStreamCaptureStatus *status, unsigned long long *id,
    cudaGraph_t *graph, const cudaGraphNode_t **, const cudaGraphEdgeData **, size_t *num_nodes) {
  *status = status_of(stream);
  if (id) *id = 1;
  if (graph) *graph = (cudaGraph_t)1;
  if (num_nodes) *num_nodes = 0;
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  is_capturing = true;
  captured_stream = stream;
  fake::log("graph", "capture");
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t *graph) {
  is_capturing = false;
  *graph = (cudaGraph_t)fake::new_handle();
  return cudaSuccess;
}

EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *) {
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamUpdateCaptureDependencies(
    cudaStream_t, cudaGraphNode_t *, const cudaGraphEdgeData *, size_t, unsigned) {
  return cudaSuccess;
}

EXPORT cudaError_t cudaGraphInstantiate(cudaGraphExec_t *graph, cudaGraph_t, unsigned long long) {
  *graph = (cudaGraphExec_t)fake::new_handle();
  return cudaSuccess;
}

EXPORT cudaError_t cudaGraphInstantiateWithFlags(
    cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiate(executable, graph, flags);
}

EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) {
  fake::log("graph", "replay");
  return cudaSuccess;
}

EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }

EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t *, size_t *number) {
  *number = 1;  // not 0, because torch warns about empty graphs
  return cudaSuccess;
}

EXPORT cudaError_t cudaUserObjectCreate(
    cudaUserObject_t *object, void *, cudaHostFn_t, unsigned, unsigned) {
  *object = (cudaUserObject_t)fake::new_handle();
  return cudaSuccess;
}

EXPORT cudaError_t cudaUserObjectRelease(cudaUserObject_t, unsigned) { return cudaSuccess; }

EXPORT cudaError_t cudaGraphRetainUserObject(
    cudaGraph_t, cudaUserObject_t, unsigned, unsigned) {
  return cudaSuccess;
}
