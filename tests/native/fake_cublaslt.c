/* A stand-in for cuBLASLt whose products run on the CPU: what the library calls of it, for matrices as it describes them.
 * With DRY it computes nothing and reads no operand. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { kOk = 0, kInvalidValue = 7, kNotSupported = 15 };
enum { kFloat32 = 0, kFloat16 = 2, kBFloat16 = 14 };

/* What tests set and read: of the algorithms that are asked for `fake_lt_found` are there at most, and of each the rank
 * that was run and the workspace; an algorithm takes `fake_lt_needed` bytes of it, or all where that is less than 0. */
int fake_lt_error = 0, fake_lt_found = 16, fake_lt_asked = 0, fake_lt_objects = 0, fake_lt_rank = -1, fake_lt_compute = 0;
long fake_lt_products = 0, fake_lt_workspace = -1, fake_lt_needed = -1;
unsigned fake_lt_alignments[4];

typedef struct { int transpose_a, transpose_b, compute; uint32_t epilogue; const char* bias; } Description;
typedef struct { int type; uint64_t rows, columns; int64_t leading; int32_t count; int64_t stride; } Layout;
typedef struct { uint64_t workspace; uint32_t alignments[4], reductions; } Preference;
typedef struct { uint64_t data[8]; } Algorithm;
typedef struct { Algorithm algorithm; size_t workspace; int status; float waves; int reserved[4]; } Found;

static void* made(const void* value, size_t size) {
  __atomic_add_fetch(&fake_lt_objects, 1, __ATOMIC_SEQ_CST);
  return memcpy(malloc(size), value, size);
}
static int destroyed(void* object) {
  __atomic_sub_fetch(&fake_lt_objects, 1, __ATOMIC_SEQ_CST);
  free(object);
  return kOk;
}

int cublasLtCreate(void** handle) { *handle = &fake_lt_error; return kOk; }
const char* cublasLtGetStatusString(int status) {
  return status == kNotSupported ? "CUBLAS_STATUS_NOT_SUPPORTED" : "CUBLAS_STATUS_INVALID_VALUE";
}
int cublasLtMatmulDescCreate(Description** out, int compute_type, int scale_type) {
  const Description plain = {0, 0, compute_type, 1, NULL};
  if ((compute_type != 68 && compute_type != 77) || scale_type != kFloat32) return kInvalidValue;
  *out = made(&plain, sizeof plain);
  return kOk;
}
int cublasLtMatmulDescSetAttribute(Description* description, int attribute, const void* value, size_t size) {
  if (attribute == 8 && size == sizeof(void*)) {
    description->bias = *(const char* const*)value;
    return kOk;
  }
  if (size != 4) return kInvalidValue;
  const uint32_t number = *(const uint32_t*)value;
  if (attribute == 3 && number == 1) description->transpose_a = 1;
  else if (attribute == 4 && number == 1) description->transpose_b = 1;
  else if (attribute == 7 && (number == 2 || number == 4 || number == 6 || number == 32 || number == 36))
    description->epilogue = number;
  else return kInvalidValue;
  return kOk;
}
int cublasLtMatmulDescDestroy(Description* description) { return destroyed(description); }
int cublasLtMatrixLayoutCreate(Layout** out, int type, uint64_t rows, uint64_t columns, int64_t leading) {
  const Layout layout = {type, rows, columns, leading, 1, 0};
  if (rows == 0 || columns == 0 || leading < (int64_t)rows) return kInvalidValue;
  *out = made(&layout, sizeof layout);
  return kOk;
}
int cublasLtMatrixLayoutSetAttribute(Layout* layout, int attribute, const void* value, size_t size) {
  if (attribute == 5 && size == 4) layout->count = *(const int32_t*)value;
  else if (attribute == 6 && size == 8) layout->stride = *(const int64_t*)value;
  else return kInvalidValue;
  return kOk;
}
int cublasLtMatrixLayoutDestroy(Layout* layout) { return destroyed(layout); }
int cublasLtMatmulPreferenceCreate(Preference** out) {
  const Preference plain = {0, {256, 256, 256, 256}, 7};
  *out = made(&plain, sizeof plain);
  return kOk;
}
int cublasLtMatmulPreferenceSetAttribute(Preference* preference, int attribute, const void* value, size_t size) {
  if (attribute == 1 && size == 8) preference->workspace = *(const uint64_t*)value;
  else if (attribute == 3 && size == 4) preference->reductions = *(const uint32_t*)value;
  else if (attribute >= 5 && attribute <= 8 && size == 4) preference->alignments[attribute - 5] = *(const uint32_t*)value;
  else return kInvalidValue;
  return kOk;
}
int cublasLtMatmulPreferenceDestroy(Preference* preference) { return destroyed(preference); }

static int fit(const Description* how, const Layout* a, const Layout* b, const Layout* d) {
  const uint64_t rows = how->transpose_a ? a->columns : a->rows, inner = how->transpose_a ? a->rows : a->columns;
  const uint64_t inner_b = how->transpose_b ? b->columns : b->rows, columns = how->transpose_b ? b->rows : b->columns;
  return rows == d->rows && columns == d->columns && inner == inner_b && a->type == b->type && a->type == d->type &&
         a->count == d->count && b->count == d->count && (how->compute == 68 || a->type == kFloat32) &&
         ((how->epilogue & 4) == 0) == (how->bias == NULL);
}
int cublasLtMatmulAlgoGetHeuristic(void* handle, Description* how, Layout* a, Layout* b, Layout* c, Layout* d,
                                   Preference* preference, int asked, Found* found, int* count) {
  if (handle != &fake_lt_error || asked < 1 || c != d || preference->reductions != 2 || !fit(how, a, b, d)) {
    return kInvalidValue;
  }
  __atomic_add_fetch(&fake_lt_asked, 1, __ATOMIC_SEQ_CST);
  memcpy(fake_lt_alignments, preference->alignments, sizeof fake_lt_alignments);
  *count = asked < fake_lt_found ? asked : fake_lt_found;
  for (int rank = 0; rank < *count; ++rank) {
    memset(&found[rank], 0, sizeof *found);
    found[rank].workspace = fake_lt_needed < 0 ? preference->workspace : (uint64_t)fake_lt_needed;
    found[rank].algorithm.data[0] = found[rank].workspace + 1;
    found[rank].algorithm.data[1] = (uint64_t)rank;
  }
  return kOk;
}

static float element(const Layout* layout, const char* base, uint64_t row, uint64_t column, int transposed) {
  const uint64_t at = transposed ? column + row * (uint64_t)layout->leading : row + column * (uint64_t)layout->leading;
  uint32_t bits = 0;
  _Float16 half;
  float out;
  if (layout->type == kFloat16) {
    memcpy(&half, base + 2 * at, 2);
    return (float)half;
  }
  if (layout->type == kBFloat16) memcpy((char*)&bits + 2, base + 2 * at, 2);
  else memcpy(&bits, base + 4 * at, 4);
  memcpy(&out, &bits, 4);
  return out;
}
static void put(const Layout* layout, char* base, uint64_t row, uint64_t column, float value) {
  const uint64_t at = row + column * (uint64_t)layout->leading;
  const _Float16 half = (_Float16)value;
  uint32_t bits;
  memcpy(&bits, &value, 4);
  bits += 0x7FFF + (bits >> 16 & 1); /* to the nearest, for bfloat16 */
  if (layout->type == kFloat16) memcpy(base + 2 * at, &half, 2);
  else if (layout->type == kBFloat16) memcpy(base + 2 * at, (char*)&bits + 2, 2);
  else memcpy(base + 4 * at, &value, 4);
}
int cublasLtMatmul(void* handle, Description* how, const float* alpha, const char* a, Layout* layout_a, const char* b,
                   Layout* layout_b, const float* beta, const char* c, Layout* layout_c, char* d, Layout* layout_d,
                   const Algorithm* algorithm, void* workspace, size_t workspace_bytes, void* stream) {
  (void)stream;
  if (fake_lt_error != 0) return fake_lt_error;
  if (handle != &fake_lt_error || *alpha != 1 || (*beta == 0 ? c != d : *beta != 1 || c == d) || layout_c != layout_d ||
      !fit(how, layout_a, layout_b, layout_d) || algorithm->data[0] != workspace_bytes + 1 ||
      (workspace_bytes != 0 && (uintptr_t)workspace % 256 != 0)) return kInvalidValue;
  __atomic_add_fetch(&fake_lt_products, 1, __ATOMIC_SEQ_CST);
  __atomic_store_n(&fake_lt_workspace, (long)workspace_bytes, __ATOMIC_SEQ_CST);
  __atomic_store_n(&fake_lt_rank, (int)algorithm->data[1], __ATOMIC_SEQ_CST);
  __atomic_store_n(&fake_lt_compute, how->compute, __ATOMIC_SEQ_CST);
#ifndef DRY
  if (workspace_bytes != 0) memset(workspace, 0x5A, workspace_bytes);
  const uint64_t inner = how->transpose_a ? layout_a->rows : layout_a->columns;
  const int64_t size = layout_a->type == kFloat32 ? 4 : 2;
  for (int32_t matrix = 0; matrix < layout_d->count; ++matrix) {
    const char* const from_a = a + matrix * layout_a->stride * size;
    const char* const from_b = b + matrix * layout_b->stride * size;
    for (uint64_t row = 0; row < layout_d->rows; ++row) {
      for (uint64_t column = 0; column < layout_d->columns; ++column) {
        float sum = 0;
        for (uint64_t at = 0; at < inner; ++at) {
          sum += element(layout_a, from_a, row, at, how->transpose_a) *
                 element(layout_b, from_b, at, column, how->transpose_b);
        }
        if (*beta != 0) sum += element(layout_c, c + matrix * layout_c->stride * size, row, column, 0);
        if (how->bias != NULL) sum += element(layout_d, how->bias, row, 0, 0);
        if ((how->epilogue & 2) != 0 && sum < 0) sum = 0;
        if ((how->epilogue & 32) != 0) sum *= 0.5f + 0.5f * tanhf(0.7978845608f * (sum + 0.044715f * sum * sum * sum));
        put(layout_d, d + matrix * layout_d->stride * size, row, column, sum);
      }
    }
  }
#endif
  return kOk;
}
