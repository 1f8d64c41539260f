// cuBLAS and cuBLASLt. Each matrix product is logged with its sizes (m, n, k), types and number.
#include "fake.h"

#include <cublasLt.h>
#include <cublas_v2.h>

#include <cstring>

namespace {

struct Handle {
  cublasMath_t math = CUBLAS_DEFAULT_MATH;
  cublasPointerMode_t pointers = CUBLAS_POINTER_MODE_HOST;
};

struct Product {
  int transposed_a = CUBLAS_OP_N;
};

struct Layout {
  cudaDataType type;
  uint64_t rows, columns;
  int32_t number = 1;
};

const char *name_of(cudaDataType type) {
  switch (type) {
    case CUDA_R_16BF:
      return "bf16";
    case CUDA_R_16F:
      return "fp16";
    case CUDA_R_32F:
      return "fp32";
    case CUDA_R_64F:
      return "fp64";
    default:
      return "?";
  }
}

void log_product(long long m, long long n, long long k, cudaDataType type, int number) {
  fake::log("gemm", "%lld\t%lld\t%lld\t%s\t%d", m, n, k, name_of(type), number);
}

}  // namespace

EXPORT cublasStatus_t cublasCreate(cublasHandle_t *handle) {
  *handle = (cublasHandle_t) new Handle;
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasDestroy(cublasHandle_t handle) {
  delete (Handle *)handle;
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasSetStream(cublasHandle_t, cudaStream_t) {
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasSetWorkspace(cublasHandle_t, void *, size_t) {
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasSetSmCountTarget(cublasHandle_t, int) { return CUBLAS_STATUS_SUCCESS; }

EXPORT cublasStatus_t cublasGetMathMode(cublasHandle_t handle, cublasMath_t *mode) {
  *mode = ((Handle *)handle)->math;
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode) {
  ((Handle *)handle)->math = mode;
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasGetPointerMode(cublasHandle_t handle, cublasPointerMode_t *mode) {
  *mode = ((Handle *)handle)->pointers;
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasSetPointerMode(cublasHandle_t handle, cublasPointerMode_t mode) {
  ((Handle *)handle)->pointers = mode;
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasGemmEx(cublasHandle_t, cublasOperation_t, cublasOperation_t, int m,
                                   int n, int k, const void *, const void *, cudaDataType type, int,
                                   const void *, cudaDataType, int, const void *, void *,
                                   cudaDataType, int, cublasComputeType_t, cublasGemmAlgo_t) {
  log_product(m, n, k, type, 1);
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasSgemm(cublasHandle_t, cublasOperation_t, cublasOperation_t, int m,
                                  int n, int k, const float *, const float *, int, const float *,
                                  int, const float *, float *, int) {
  log_product(m, n, k, CUDA_R_32F, 1);
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasSgemmStridedBatched(cublasHandle_t, cublasOperation_t,
                                                cublasOperation_t, int m, int n, int k,
                                                const float *, const float *, int, long long,
                                                const float *, int, long long, const float *,
                                                float *, int, long long, int number) {
  log_product(m, n, k, CUDA_R_32F, number);
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasGemmStridedBatchedEx(
    cublasHandle_t, cublasOperation_t, cublasOperation_t, int m, int n, int k, const void *,
    const void *, cudaDataType type, int, long long, const void *, cudaDataType, int, long long,
    const void *, void *, cudaDataType, int, long long, int number, cublasComputeType_t,
    cublasGemmAlgo_t) {
  log_product(m, n, k, type, number);
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasSgemv(cublasHandle_t, cublasOperation_t, int m, int n, const float *,
                                  const float *, int, const float *, int, const float *, float *,
                                  int) {
  log_product(m, 1, n, CUDA_R_32F, 1);
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasSdot(
    cublasHandle_t, int n, const float *, int, const float *, int, float *) {
  log_product(1, 1, n, CUDA_R_32F, 1);
  return CUBLAS_STATUS_SUCCESS;
}

// ---- cuBLASLt --------------------------------------------------------------------------------

EXPORT size_t cublasLtGetVersion() { return 130400; }

EXPORT cublasStatus_t cublasLtMatmulDescCreate(
    cublasLtMatmulDesc_t *product, cublasComputeType_t, cudaDataType_t) {
  *product = (cublasLtMatmulDesc_t) new Product;
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t product) {
  delete (Product *)product;
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t product,
                                                     cublasLtMatmulDescAttributes_t attribute,
                                                     const void *value, size_t) {
  if (attribute == CUBLASLT_MATMUL_DESC_TRANSA)
    ((Product *)product)->transposed_a = *(const int32_t *)value;
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout, cudaDataType type,
                                                 uint64_t rows, uint64_t columns, int64_t) {
  *layout = (cublasLtMatrixLayout_t) new Layout{type, rows, columns};
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  delete (Layout *)layout;
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                       cublasLtMatrixLayoutAttribute_t attribute,
                                                       const void *value, size_t) {
  if (attribute == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT)
    ((Layout *)layout)->number = *(const int32_t *)value;
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *preference) {
  *preference = (cublasLtMatmulPreference_t)fake::new_handle();
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t) {
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatmulPreferenceSetAttribute(
    cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t, const void *, size_t) {
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
    cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatmulPreference_t, int,
    cublasLtMatmulHeuristicResult_t *results, int *number) {
  memset(results, 0, sizeof *results);
  *number = 1;
  return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t product, const void *,
                                     const void *, cublasLtMatrixLayout_t a, const void *,
                                     cublasLtMatrixLayout_t, const void *, const void *,
                                     cublasLtMatrixLayout_t, void *, cublasLtMatrixLayout_t d,
                                     const cublasLtMatmulAlgo_t *, void *, size_t, cudaStream_t) {
  const Layout &left = *(const Layout *)a;
  const Layout &result = *(const Layout *)d;
  const bool transposed = ((const Product *)product)->transposed_a != CUBLAS_OP_N;
  log_product(result.rows, result.columns, transposed ? left.rows : left.columns, left.type,
              result.number);
  return CUBLAS_STATUS_SUCCESS;
}
