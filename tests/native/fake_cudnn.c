/* A stand-in for cuDNN's graph interface whose convolutions run on the CPU: the objects that the library makes, and what
 * follows a convolution, for tensors as it describes them.  With DRY it computes nothing and reads no operand. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { kOk = 0, kBadParameter = 2000, kNotSupported = 3000 };
enum { kConfiguration = 3, kHeuristic = 4, kPlan = 5, kConvolution = 10, kPointwise = 13, kGraph = 15, kPack = 16, kTensor = 17 };
enum { kFloat32 = 0, kFloat16 = 2, kBFloat16 = 9, kMost = 32 };

/* What tests set and read: of the configurations `fake_dnn_found` are proposed, of which those in the bits of
 * `fake_dnn_refused` make no plan, and those in `fake_dnn_noted` have the note `fake_dnn_note`; a plan takes
 * `fake_dnn_needed` bytes of workspace; the configuration that was run. */
int fake_dnn_error = 0, fake_dnn_found = 4, fake_dnn_refused = 0, fake_dnn_noted = 0, fake_dnn_note = 4, fake_dnn_objects = 0;
int fake_dnn_rank = -1, fake_dnn_asked = 0, fake_dnn_nan = 0;
long fake_dnn_runs = 0, fake_dnn_needed = 0;

typedef struct { int name, type; int64_t count; void* values; } Attribute;
typedef struct Object { int kind, finished, count, place; struct Object* graph; Attribute attributes[16]; } Object;

static int64_t width(int type) {
  return type == 2 ? 1 : type == 3 || type == 5 || type == 6 || type == 0 || type == 15 ? 8 : 4;
}
static const Attribute* find(const Object* object, int name) {
  for (int i = 0; i < object->count; ++i) if (object->attributes[i].name == name) return &object->attributes[i];
  return NULL;
}
static const int64_t* numbers(const Object* object, int name) { return find(object, name)->values; }
static int number(const Object* object, int name) { return *(const int*)find(object, name)->values; }
static Object* part(const Object* object, int name) {
  const Attribute* found = find(object, name);
  return found == NULL ? NULL : *(Object* const*)found->values;
}

int cudnnCreate(void** handle) { *handle = &fake_dnn_error; return kOk; }
int cudnnSetStream(void* handle, void* stream) { (void)stream; return handle == &fake_dnn_error ? kOk : kBadParameter; }
const char* cudnnGetErrorString(int status) {
  return status == kNotSupported ? "CUDNN_STATUS_NOT_SUPPORTED" : "CUDNN_STATUS_BAD_PARAM";
}
int cudnnBackendCreateDescriptor(int kind, Object** out) {
  *out = calloc(1, sizeof **out);
  (*out)->kind = kind;
  __atomic_add_fetch(&fake_dnn_objects, 1, __ATOMIC_SEQ_CST);
  return kOk;
}
int cudnnBackendDestroyDescriptor(Object* object) {
  for (int i = 0; i < object->count; ++i) free(object->attributes[i].values);
  free(object);
  __atomic_sub_fetch(&fake_dnn_objects, 1, __ATOMIC_SEQ_CST);
  return kOk;
}
int cudnnBackendSetAttribute(Object* object, int name, int type, int64_t count, const void* values) {
  if (object->finished || object->count == 16 || count < 1 || find(object, name) != NULL) return kBadParameter;
  void* const copy = memcpy(malloc((size_t)(count * width(type))), values, (size_t)(count * width(type)));
  object->attributes[object->count++] = (Attribute){name, type, count, copy};
  return kOk;
}

/* Whether a convolution's tensors and its zeros, steps and places fit one another. */
static int fits(const Object* object) {
  const Object *how = part(object, 702), *w = part(object, 703), *x = part(object, 704), *y = part(object, 705);
  const int64_t axes = *numbers(how, 106), *xs = numbers(x, 902), *ws = numbers(w, 902), *ys = numbers(y, 902);
  if (find(x, 902)->count != axes + 2 || axes < 2 || axes > 3 || xs[0] != ys[0] || ws[0] != ys[1] || ws[1] != xs[1]) return 0;
  for (int64_t axis = 0; axis < axes; ++axis) {
    const int64_t span = (ws[axis + 2] - 1) * numbers(how, 102)[axis] + 1;
    const int64_t held = xs[axis + 2] + numbers(how, 105)[axis] + numbers(how, 104)[axis];
    if (held < span || (held - span) / numbers(how, 103)[axis] + 1 != ys[axis + 2]) return 0;
  }
  return number(how, 101) == 1 && number(how, 100) == kFloat32;
}
int cudnnBackendFinalize(Object* object) {
  object->finished = 1;
  if (object->kind == kConvolution) return fits(object) ? kOk : kBadParameter;
  if (object->kind == kPlan) {
    object->place = part(object, 401)->place, object->graph = part(object, 401)->graph;
    return fake_dnn_refused >> object->place & 1 ? kNotSupported : kOk;
  }
  return kOk;
}
int cudnnBackendGetAttribute(Object* object, int name, int type, int64_t room, int64_t* count, void* values) {
  (void)type;
  if (!object->finished && object->kind != kConfiguration && name != 1303) return kBadParameter;
  if (name == 202) {
    __atomic_add_fetch(&fake_dnn_asked, 1, __ATOMIC_SEQ_CST);
    *count = room < fake_dnn_found ? room : fake_dnn_found;
    for (int i = 0; i < *count; ++i) ((Object**)values)[i]->place = i, ((Object**)values)[i]->graph = part(object, 201);
  } else if (name == 300) {
    (*(Object**)values)->place = object->place;
    *count = 1;
  } else if (name == 1303) {
    *count = fake_dnn_noted >> object->place & 1;
    if (*count != 0) *(int*)values = fake_dnn_note;
  } else if (name == 402) {
    *(int64_t*)values = fake_dnn_needed, *count = 1;
  } else {
    return kNotSupported;
  }
  return kOk;
}

#ifndef DRY
static float element(const Object* tensor, const char* base, int64_t at) {
  uint32_t bits = 0;
  _Float16 half;
  float out;
  switch (number(tensor, 901)) {
    case kFloat16: memcpy(&half, base + 2 * at, 2); return (float)half;
    case kBFloat16: memcpy((char*)&bits + 2, base + 2 * at, 2); break;
    default: memcpy(&bits, base + 4 * at, 4);
  }
  memcpy(&out, &bits, 4);
  return out;
}
static void put(const Object* tensor, char* base, int64_t at, float value) {
  const _Float16 half = (_Float16)value;
  uint32_t bits;
  memcpy(&bits, &value, 4);
  switch (number(tensor, 901)) {
    case kFloat16: memcpy(base + 2 * at, &half, 2); break;
    case kBFloat16: bits += 0x7FFF + (bits >> 16 & 1), memcpy(base + 2 * at, (char*)&bits + 2, 2); break; /* to the nearest */
    default: memcpy(base + 4 * at, &bits, 4);
  }
}
/* An element's place in a tensor by its place in one of these sizes, of which it has all or one. */
static int64_t place(const Object* tensor, const int64_t* sizes, int64_t axes, int64_t index) {
  const int64_t *own = numbers(tensor, 902), *strides = numbers(tensor, 903);
  int64_t out = 0;
  for (int64_t axis = axes; axis-- > 0; index /= sizes[axis]) if (own[axis] != 1) out += index % sizes[axis] * strides[axis];
  return out;
}
static float sum(const Object* object, const char* x, const char* w, int64_t index) {
  const Object *how = part(object, 702), *weights = part(object, 703), *image = part(object, 704);
  const int64_t *xs = numbers(image, 902), *ws = numbers(weights, 902), *ys = numbers(part(object, 705), 902);
  const int64_t axes = *numbers(how, 106);
  int64_t at[5] = {0}, taps = 1;
  for (int64_t axis = axes + 2; axis-- > 0; index /= ys[axis]) at[axis] = index % ys[axis];
  for (int64_t axis = 2; axis < axes + 2; ++axis) taps *= ws[axis];
  float out = 0;
  for (int64_t tap = 0; tap < taps; ++tap) {
    int64_t rest = tap, from_x = at[0] * numbers(image, 903)[0], from_w = at[1] * numbers(weights, 903)[0], inside = 1;
    for (int64_t axis = axes; axis-- > 0; rest /= ws[axis + 2]) {
      const int64_t own = rest % ws[axis + 2];
      const int64_t seen = at[axis + 2] * numbers(how, 103)[axis] + own * numbers(how, 102)[axis] - numbers(how, 105)[axis];
      inside &= seen >= 0 && seen < xs[axis + 2];
      from_x += seen * numbers(image, 903)[axis + 2], from_w += own * numbers(weights, 903)[axis + 2];
    }
    for (int64_t c = 0; inside && c < xs[1]; ++c)
      out += element(image, x, from_x + c * numbers(image, 903)[1]) * element(weights, w, from_w + c * numbers(weights, 903)[1]);
  }
  return out;
}
static float follow(int mode, float value, float other) {
  switch (mode) {
    case 0: return value + other;
    case 100: return value < 0 ? 0 : value; /* what is no number stays none, as it is asked for */
    case 106: return value / (1 + expf(-value));
    default: return value * (0.5f + 0.5f * tanhf(0.7978845608f * (value + 0.044715f * value * value * value)));
  }
}
static char* memory(const Object* tensor, const Object* pack, char** kept, int64_t* names, int* known) {
  const int64_t name = *numbers(tensor, 906);
  const Attribute *given = find(pack, 1000), *addresses = find(pack, 1001);
  for (int64_t i = 0; i < given->count; ++i) if (((int64_t*)given->values)[i] == name) return ((char**)addresses->values)[i];
  for (int i = 0; i < *known; ++i) if (names[i] == name) return kept[i];
  int64_t size = 4;
  for (int64_t i = 0; i < find(tensor, 902)->count; ++i) size *= numbers(tensor, 902)[i];
  names[*known] = name;
  return kept[(*known)++] = malloc((size_t)size);
}
static void compute(const Object* graph, const Object* pack) {
  char* kept[kMost];
  int64_t names[kMost];
  int known = 0;
  const Attribute* const operations = find(graph, 801);
  for (int64_t i = 0; i < operations->count; ++i) {
    const Object* const each = ((Object**)operations->values)[i];
    const int first = each->kind == kConvolution;
    const Object *into = part(each, first ? 705 : 753), *of = part(each, first ? 704 : 751), *other = part(each, first ? 703 : 752);
    char *const out = memory(into, pack, kept, names, &known), *const read = memory(of, pack, kept, names, &known);
    char* const beside = other == NULL ? NULL : memory(other, pack, kept, names, &known);
    const int64_t axes = find(into, 902)->count;
    int64_t count = 1;
    for (int64_t axis = 0; axis < axes; ++axis) count *= numbers(into, 902)[axis];
    if (!first) fake_dnn_nan |= find(part(each, 750), 2) != NULL && number(part(each, 750), 2) == 1;
    for (int64_t at = 0; at < count; ++at) {
      const int64_t from = place(into, numbers(into, 902), axes, at);
      const float value = first ? sum(each, read, beside, at)
          : follow(number(part(each, 750), 0), element(of, read, from),
                   other == NULL ? 0 : element(other, beside, place(other, numbers(into, 902), axes, at)));
      put(into, out, from, value);
    }
  }
  for (int i = 0; i < known; ++i) free(kept[i]);
}
#endif

int cudnnBackendExecute(void* handle, Object* plan, Object* pack) {
  if (fake_dnn_error != 0) return fake_dnn_error;
  void* const workspace = *(void**)find(pack, 1003)->values;
  if (handle != &fake_dnn_error || plan->kind != kPlan || pack->kind != kPack || !plan->finished || !pack->finished ||
      (fake_dnn_needed != 0 && (workspace == NULL || (uintptr_t)workspace % 256 != 0))) return kBadParameter;
  __atomic_add_fetch(&fake_dnn_runs, 1, __ATOMIC_SEQ_CST);
  __atomic_store_n(&fake_dnn_rank, plan->place, __ATOMIC_SEQ_CST);
#ifndef DRY
  if (fake_dnn_needed != 0) memset(workspace, 0x5A, (size_t)fake_dnn_needed);
  compute(plan->graph, pack);
#endif
  return kOk;
}
