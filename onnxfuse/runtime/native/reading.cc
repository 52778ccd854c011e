#include "reading.h"

#include "ort_api.h"

namespace onnxfuse {

void limit(size_t count, size_t most, const char* what) {
  if (count <= most) return;
  throw Error("the launch plan has " + std::to_string(count) + " " + what + "; " + std::to_string(most) + " at most");
}

const std::vector<Json>& items(const Json& json, const char* key, size_t most, const char* what) {
  const std::vector<Json>& out = json.member(key).list(("'" + std::string(key) + "'").c_str());
  limit(out.size(), most, what);
  return out;
}

const std::string& words(const Json& json, const char* what) {
  const std::string& out = json.text(what);
  if (out.size() > Most::kLetters) {
    throw Error(std::string(what) + " has " + std::to_string(out.size()) + " bytes; " +
                std::to_string(Most::kLetters) + " at most");
  }
  // It would end there in messages and for the driver.
  if (out.find('\0') != std::string::npos) throw Error(std::string(what) + " has a zero byte");
  return out;
}

}  // namespace onnxfuse
