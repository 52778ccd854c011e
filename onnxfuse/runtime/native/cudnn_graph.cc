#include "cudnn_graph.h"

#include "ort_api.h"
#include "shared_library.h"

namespace onnxfuse {
namespace cudnn {

const Library& Library::get() {
  static const Library library;  // a constructor that throws is tried again at the next call
  return library;
}

Library::Library() {
  const SharedLibrary library("cuDNN", "libcudnn.so.", "ONNXFUSE_LIBCUDNN", 9, 9, "a convolution");
  library.find(&start, "cudnnCreate");
  library.find(&set_stream, "cudnnSetStream");
  library.find(&create, "cudnnBackendCreateDescriptor");
  library.find(&destroy, "cudnnBackendDestroyDescriptor");
  library.find(&set, "cudnnBackendSetAttribute");
  library.find(&get_attribute, "cudnnBackendGetAttribute");
  library.find(&finalize, "cudnnBackendFinalize");
  library.find(&execute, "cudnnBackendExecute");
  library.find(&status_text, "cudnnGetErrorString");
}

void Library::check(Status status, const std::string& what) const {
  if (status == 0) return;
  const char* const text = status_text(status);
  throw Error("cuDNN could not " + what + ": " +
              (text == nullptr ? "status " + std::to_string(status) : std::string(text)));
}

Object::Object(Kind kind, std::string what) : library_(Library::get()), what_(std::move(what)) {
  library_.check(library_.create(kind, &object_), what_);
}

Object::~Object() {
  if (object_ != nullptr) library_.destroy(object_);
}

Object& Object::set(Attribute attribute, Type type, const void* values, int64_t count) {
  library_.check(library_.set(object_, attribute, type, count, values), what_);
  return *this;
}

Object& Object::finish() {
  library_.check(library_.finalize(object_), what_);
  return *this;
}

bool Object::finishes() { return library_.finalize(object_) == 0; }

void Object::get(Attribute attribute, const std::vector<std::unique_ptr<Object>>& into, int64_t* count) const {
  std::vector<Descriptor> objects;
  for (const auto& each : into) objects.push_back(each->object_);
  library_.check(library_.get_attribute(object_, attribute, kObject, static_cast<int64_t>(objects.size()), count,
                                        objects.data()),
                 what_);
}

}  // namespace cudnn
}  // namespace onnxfuse
