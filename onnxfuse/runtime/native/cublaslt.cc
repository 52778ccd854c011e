#include "cublaslt.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <mutex>
#include <unordered_map>

#include "ort_api.h"
#include "shared_library.h"

namespace onnxfuse {
namespace {

using Status = int;
using Handle = struct HandleTag*;
using Description = struct DescriptionTag*;
using Layout = struct LayoutTag*;
using Preference = struct PreferenceTag*;

struct Algorithm {  // cublasLtMatmulAlgo_t
  uint64_t data[8];
};
struct Found {  // cublasLtMatmulHeuristicResult_t
  Algorithm algorithm;
  size_t workspace;
  Status status;
  float waves;
  int reserved[4];
};
static_assert(sizeof(Found) == 96);

// cudaDataType_t and cublasComputeType_t of float16, bfloat16, float32 and tf32, in the order of the routine's types:
// products of float32 are those of float32, and only those of tf32 round their operands.
constexpr int kTypes[] = {2, 14, 0, 0};
constexpr int kComputed[] = {68, 68, 68, 77};
constexpr int kFloat32 = 0;     // cudaDataType_t
constexpr int kTransposed = 1;  // cublasOperation_t
constexpr int kTransposeA = 3, kTransposeB = 4, kEpilogue = 7, kBiasPointer = 8;  // cublasLtMatmulDescAttributes_t
constexpr int kBatchCount = 5, kBatchStride = 6;                                   // cublasLtMatrixLayoutAttribute_t
// cublasLtMatmulPreferenceAttributes_t
constexpr int kMostWorkspace = 1, kReductions = 3, kAlignmentA = 5, kAlignmentB = 6, kAlignmentC = 7, kAlignmentD = 8;
// cublasLtReductionScheme_t: parts of a sum are added in 32 bits and in one order, not as the result's type holds them.
constexpr uint32_t kAddedIn32Bits = 2;
// cublasLtEpilogue_t: nothing, ReLU and GELU (by tanh), in the order of the routine's activations; with a bias its bit.
constexpr uint32_t kEpilogues[] = {0, 2, 32}, kBias = 4;
constexpr size_t kMostKept = 64;          // algorithms of a call, by alignments and workspace
constexpr int64_t kMostRank = 15;         // of an algorithm among those that the library proposes

// The sizes of a call, in the order of the routine's.
struct Sizes {
  int64_t m, n, k, batch, stride_a, stride_b, stride_c, transpose_a, transpose_b, activation, algorithm;
  explicit Sizes(const std::vector<int64_t>& s)
      : m(s[0]), n(s[1]), k(s[2]), batch(s[3]), stride_a(s[4]), stride_b(s[5]), stride_c(s[6]), transpose_a(s[7]),
        transpose_b(s[8]), activation(s[9]), algorithm(s[10]) {}
  std::string text() const {
    return (batch == 1 ? "" : std::to_string(batch) + " x ") + std::to_string(m) + "x" + std::to_string(n) + "x" +
           std::to_string(k);
  }
};

// The functions of the library, found once in the process.
struct Library {
  // Throws Error where it is not there.
  static const Library& get() {
    static const Library library;  // a constructor that throws is tried again at the next call
    return library;
  }

  void check(Status status, const std::string& what) const {
    if (status == 0) return;
    const char* const text = status_text == nullptr ? nullptr : status_text(status);
    throw Error("cuBLASLt could not " + what + ": " +
                (text == nullptr ? "status " + std::to_string(status) : std::string(text)));
  }

  Status (*create)(Handle* handle);
  Status (*create_description)(Description* out, int compute_type, int scale_type);
  Status (*set_description)(Description description, int attribute, const void* value, size_t size);
  Status (*destroy_description)(Description description);
  Status (*create_layout)(Layout* out, int type, uint64_t rows, uint64_t columns, int64_t leading);
  Status (*set_layout)(Layout layout, int attribute, const void* value, size_t size);
  Status (*destroy_layout)(Layout layout);
  Status (*create_preference)(Preference* out);
  Status (*set_preference)(Preference preference, int attribute, const void* value, size_t size);
  Status (*destroy_preference)(Preference preference);
  Status (*choose)(Handle handle, Description description, Layout a, Layout b, Layout c, Layout d,
                   Preference preference, int asked, Found* found, int* count);
  Status (*multiply)(Handle handle, Description description, const void* alpha, const void* a, Layout layout_a,
                     const void* b, Layout layout_b, const void* beta, const void* c, Layout layout_c, void* d,
                     Layout layout_d, const Algorithm* algorithm, void* workspace, size_t workspace_bytes,
                     Stream stream);
  const char* (*status_text)(Status status);  // null before CUDA 11.5

 private:
  Library();
};

Library::Library() {
  const SharedLibrary library("cuBLASLt", "libcublasLt.so.", "ONNXFUSE_LIBCUBLASLT", Driver::get().version() / 1000, 12,
                              "a matrix product");
  library.find(&create, "cublasLtCreate");
  library.find(&create_description, "cublasLtMatmulDescCreate");
  library.find(&set_description, "cublasLtMatmulDescSetAttribute");
  library.find(&destroy_description, "cublasLtMatmulDescDestroy");
  library.find(&create_layout, "cublasLtMatrixLayoutCreate");
  library.find(&set_layout, "cublasLtMatrixLayoutSetAttribute");
  library.find(&destroy_layout, "cublasLtMatrixLayoutDestroy");
  library.find(&create_preference, "cublasLtMatmulPreferenceCreate");
  library.find(&set_preference, "cublasLtMatmulPreferenceSetAttribute");
  library.find(&destroy_preference, "cublasLtMatmulPreferenceDestroy");
  library.find(&choose, "cublasLtMatmulAlgoGetHeuristic");
  library.find(&multiply, "cublasLtMatmul");
  status_text = reinterpret_cast<decltype(status_text)>(library.look("cublasLtGetStatusString"));
}

// The library's handle on a GPU, which any thread may use; made with the device's context current, and never destroyed:
// sessions that end with the process still use it.
Handle handle_of(const Device& device) {
  static std::mutex mutex;
  static auto& handles = *new std::unordered_map<int, Handle>;
  const Library& library = Library::get();
  const std::lock_guard<std::mutex> lock(mutex);
  const auto known = handles.find(device.ordinal);
  if (known != handles.end()) return known->second;
  const Current current(device.driver, device.context);
  const OutsideCaptures outside(device.driver);
  Handle handle = nullptr;
  library.check(library.create(&handle), "start");
  return handles[device.ordinal] = handle;
}

// One of the library's objects, destroyed with its owner.
template <class Object>
class Owned {
 public:
  explicit Owned(Status (*destroy)(Object)) : destroy_(destroy) {}
  ~Owned() {
    if (object_ != nullptr) destroy_(object_);
  }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  Object* out() { return &object_; }
  operator Object() const { return object_; }

 private:
  Object object_ = nullptr;
  Status (*destroy_)(Object);
};

class Gemm : public PreparedCall {
 public:
  Gemm(Device& device, size_t type, const Sizes& sizes, bool biased, bool added)
      : driver_(device.driver), library_(Library::get()), handle_(handle_of(device)), sizes_(sizes),
        running_("run the product " + sizes_.text()), biased_(biased), added_(added), operands_(3u + biased + added),
        description_(library_.destroy_description), a_(library_.destroy_layout), b_(library_.destroy_layout),
        c_(library_.destroy_layout) {
    const std::string what = "describe the product " + sizes_.text();
    library_.check(library_.create_description(description_.out(), kComputed[type], kFloat32), what);
    // The library's matrices are column-major, and a row-major matrix is the transpose of one: what it computes is
    // the transpose of C, B's times A's.
    const auto transpose = [&](int attribute, int64_t wanted) {
      if (wanted == 0) return;
      library_.check(library_.set_description(description_, attribute, &kTransposed, sizeof kTransposed), what);
    };
    transpose(kTransposeA, sizes.transpose_b);
    transpose(kTransposeB, sizes.transpose_a);
    // A vector that is added to each row is added to each column of the transpose, which is what a bias is.
    const uint32_t epilogue = kEpilogues[sizes.activation] | (biased ? kBias : 0);
    if (epilogue != 0) {
      library_.check(library_.set_description(description_, kEpilogue, &epilogue, sizeof epilogue), what);
    }
    const auto describe = [&](Owned<Layout>* out, int64_t rows, int64_t columns, int64_t stride) {
      const auto row = static_cast<uint64_t>(columns), column = static_cast<uint64_t>(rows);
      library_.check(library_.create_layout(out->out(), kTypes[type], row, column, columns), what);
      if (sizes.batch == 1) return;
      const auto count = static_cast<int32_t>(sizes.batch);
      library_.check(library_.set_layout(*out, kBatchCount, &count, sizeof count), what);
      library_.check(library_.set_layout(*out, kBatchStride, &stride, sizeof stride), what);
    };
    describe(&a_, sizes.transpose_a ? sizes.k : sizes.m, sizes.transpose_a ? sizes.m : sizes.k, sizes.stride_a);
    describe(&b_, sizes.transpose_b ? sizes.n : sizes.k, sizes.transpose_b ? sizes.k : sizes.n, sizes.stride_b);
    describe(&c_, sizes.m, sizes.n, sizes.stride_c);
  }

  size_t choose(const std::vector<uint64_t>& addresses, size_t most) override {
    check_operands(addresses);
    Kept wanted{{}, most, 0, {}};
    for (size_t index = 0; index < operands_; ++index) wanted.alignments[index] = alignment(addresses[index]);
    for (const Kept& kept : kept_) {
      if (!std::equal(kept.alignments, kept.alignments + operands_, wanted.alignments) || kept.most != most) continue;
      chosen_ = kept;
      return kept.workspace;
    }
    const OutsideCaptures outside(driver_);
    set_bias(addresses);
    propose(&wanted);
    if (kept_.size() == kMostKept) kept_.clear();
    kept_.push_back(wanted);
    chosen_ = wanted;
    return wanted.workspace;
  }

  void run(const Operands& operands) override {
    // A kernel of the library may be loaded at its first launch, also while a graph is captured.
    const OutsideCaptures outside(driver_);
    const float one = 1, zero = 0;
    const auto address = [&](size_t index) { return reinterpret_cast<void*>(operands.addresses[index]); };
    void* const result = address(operands_ - 1);
    void* const addend = added_ ? address(operands_ - 2) : result;
    check_operands(operands.addresses);
    set_bias(operands.addresses);
    library_.check(
        library_.multiply(handle_, description_, &one, address(1), b_, address(0), a_, added_ ? &one : &zero, addend, c_,
                          result, c_, &chosen_.algorithm, reinterpret_cast<void*>(operands.workspace), operands.workspace_bytes,
                          operands.stream),
        running_);
  }

 private:
  // An algorithm for operands that are so aligned, with `most` bytes of workspace at most, of which it takes so many.
  struct Kept {
    uint32_t alignments[5];
    size_t most, workspace;
    Algorithm algorithm;
  };

  void check_operands(const std::vector<uint64_t>& addresses) const {
    if (std::count(addresses.begin(), addresses.begin() + static_cast<ptrdiff_t>(operands_), 0) > 0) {
      throw Error("an operand of the product " + sizes_.text() + " is absent");
    }
  }

  // The description has the bias's address, also for the choice of an algorithm.
  void set_bias(const std::vector<uint64_t>& addresses) {
    if (!biased_ || addresses[2] == bias_) return;
    library_.check(library_.set_description(description_, kBiasPointer, &addresses[2], sizeof addresses[2]),
                   "describe the product " + sizes_.text());
    bias_ = addresses[2];
  }

  // The algorithm of the wanted rank among those that the library proposes, the quickest as it takes them first; the last
  // one where it proposes fewer, as it may at other sizes than those that the rank was measured at.
  void propose(Kept* wanted) {
    const std::string what = "choose an algorithm for the product " + sizes_.text();
    Owned<Preference> preference(library_.destroy_preference);
    library_.check(library_.create_preference(preference.out()), what);
    const auto set = [&](int attribute, const auto& value) {
      library_.check(library_.set_preference(preference, attribute, &value, sizeof value), what);
    };
    set(kMostWorkspace, static_cast<uint64_t>(wanted->most));
    set(kReductions, kAddedIn32Bits);
    set(kAlignmentA, wanted->alignments[1]);
    set(kAlignmentB, wanted->alignments[0]);
    set(kAlignmentC, wanted->alignments[operands_ - (added_ ? 2 : 1)]);
    set(kAlignmentD, wanted->alignments[operands_ - 1]);
    const int asked = static_cast<int>(sizes_.algorithm) + 1;
    std::vector<Found> found(static_cast<size_t>(asked));
    int count = 0;
    library_.check(library_.choose(handle_, description_, b_, a_, c_, c_, preference, asked, found.data(), &count), what);
    if (count < 1) throw Error("cuBLASLt has no algorithm for the product " + sizes_.text());
    const Found& taken = found[static_cast<size_t>(std::min(count, asked)) - 1];
    library_.check(taken.status, what);
    wanted->algorithm = taken.algorithm;
    wanted->workspace = std::min(taken.workspace, wanted->most);
  }

  const Driver& driver_;
  const Library& library_;
  const Handle handle_;
  const Sizes sizes_;
  const std::string running_;  // what fails where a run does: made once, runs are many
  const bool biased_, added_;
  const size_t operands_;  // a, b, the bias where there is one, what is added where it is, c
  Owned<Description> description_;
  Owned<Layout> a_, b_, c_;
  uint64_t bias_ = 0;  // the address that the description has
  std::vector<Kept> kept_;
  Kept chosen_{};
};

bool fits(const std::vector<int64_t>& values) {
  const Sizes sizes(values);
  const auto check = [](const char* name, int64_t value, int64_t least, int64_t most) {
    if (value >= least && value <= most) return;
    throw Error("a gemm of the launch plan has the " + std::string(name) + " " + std::to_string(value) + "; it is " +
                std::to_string(least) + " to " + std::to_string(most));
  };
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max(), kMostStride = int64_t{1} << 48;
  check("m", sizes.m, 0, kMost);
  check("n", sizes.n, 0, kMost);
  check("k", sizes.k, 0, kMost);
  check("batch", sizes.batch, 0, kMost);
  check("stride_a", sizes.stride_a, 0, kMostStride);
  check("stride_b", sizes.stride_b, 0, kMostStride);
  check("transpose_a", sizes.transpose_a, 0, 1);
  check("transpose_b", sizes.transpose_b, 0, 1);
  check("activation", sizes.activation, 0, static_cast<int64_t>(std::size(kEpilogues)) - 1);
  check("algorithm", sizes.algorithm, 0, kMostRank);
  if (sizes.m == 0 || sizes.n == 0 || sizes.batch == 0) return false;
  check("k", sizes.k, 1, kMost);  // an empty sum would have to be written as zeros
  // Matrices of a result that lie in one another would be written at once.
  check("stride_c", sizes.stride_c, sizes.batch == 1 ? 0 : std::min(sizes.m * sizes.n, kMostStride), kMostStride);
  return true;
}

template <bool biased, bool added>
Routine routine(const char* name) {
  return {
      name,
      {"float16", "bfloat16", "float32", "tf32"},
      3u + biased + added,
      {"m", "n", "k", "batch", "stride_a", "stride_b", "stride_c", "transpose_a", "transpose_b", "activation",
       "algorithm"},
      fits,
      [](Device& device) { handle_of(device); },
      [](Device& device, size_t type, const std::vector<int64_t>& sizes) -> std::unique_ptr<PreparedCall> {
        return std::make_unique<Gemm>(device, type, Sizes(sizes), biased, added);
      },
  };
}

}  // namespace

const Routine& gemm_routine(bool biased, bool added) {
  static const Routine made[2][2] = {{routine<false, false>("gemm"), routine<false, true>("gemm_add")},
                                     {routine<true, false>("gemm_bias"), routine<true, true>("gemm_bias_add")}};
  return made[biased][added];
}

}  // namespace onnxfuse
