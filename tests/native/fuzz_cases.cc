#include "fuzz_cases.h"

#include <algorithm>
#include <cctype>
#include <cstring>
#include <stdexcept>

namespace fuzz {
namespace {

constexpr size_t kHosts = 8;

class Parser {
 public:
  explicit Parser(const std::string& text) : text_(text) {}
  Tree value() {
    Tree out;
    const char first = text_.at(at_);
    if (first == '"') {
      out.kind = Tree::Kind::kText, out.text = string();
    } else if (first == '[' || first == '{') {
      out.kind = first == '[' ? Tree::Kind::kList : Tree::Kind::kObject;
      for (++at_; text_.at(at_) != ']' && text_.at(at_) != '}';) {
        if (first == '{') out.keys.push_back(string()), ++at_;
        out.items.push_back(value());
        if (text_.at(at_) == ',') ++at_;
      }
      ++at_;
    } else {
      while (at_ < text_.size() && std::strchr(",]}", text_[at_]) == nullptr) out.text += text_[at_++];
    }
    return out;
  }

 private:
  std::string string() {
    const size_t start = ++at_;
    for (; text_.at(at_) != '"'; ++at_) at_ += text_[at_] == '\\';
    return text_.substr(start, at_++ - start);
  }
  const std::string& text_;
  size_t at_ = 0;
};

void collect(Tree* tree, std::vector<Tree*>* out) {
  out->push_back(tree);
  for (Tree& item : tree->items) collect(&item, out);
}

const char* const kNumbers[] = {
    "0", "1", "-1", "2", "3", "7", "16", "32", "64", "255", "256", "1024", "4096", "65535", "2147483647", "2147483648",
    "-2147483648", "4294967296", "9223372036854775807", "-9223372036854775808", "9223372036854775808",
    "99999999999999999999", "00", "-0", "1e3", "1.5", "-"};
const char* const kOperators[] = {"+", "-", "*", "//", "%", "min", "max", "==", "!=", "<", "<=", "and", "or", "not",
                                  "ceil", "bcast", "sel"};
const char* const kSignificant[] = {"\"", "\\", "{", "}", "[", "]", ",", ":", "\\u0000", "\\ud800", "\\u00e9", "\xc3",
                                    "\xff", "null", "true", "1", "-", "\n", " ", "\x00\x01"};

std::string number(Random& random) {
  return random.once_in(4) ? std::to_string(static_cast<int64_t>(random.next())) : random.of(kNumbers);
}

std::string atom(Random& random) {
  const std::string index = std::to_string(random.below(random.once_in(8) ? 5000 : 3));
  switch (random.below(10)) {
    case 0: return "i" + index + ".addr";
    case 1: return "o" + index + ".addr";
    case 2: return "i" + index + ".n";
    case 3: return "h" + index + "." + (random.once_in(2) ? "n" : number(random));
    case 4: return "s" + index;
    case 5: return random.once_in(2) ? "sm" : "sms";
    case 6: return number(random);
    default: return "i" + index + "." + (random.once_in(8) ? number(random) : std::to_string(random.below(4)));
  }
}

std::string expression(Random& random) {
  std::string out = atom(random);
  const size_t parts = random.once_in(50) ? 100 : random.below(4);
  for (size_t part = 0; part < parts; ++part) {
    const std::string operation = random.of(kOperators);
    const size_t taken = operation == "not" ? 1 : operation == "sel" ? 3 : 2;
    for (size_t more = 1; more < taken; ++more) out += " " + atom(random);
    if (!random.once_in(40)) out += " " + operation;
  }
  return out;
}

// Another text where an expression, an argument, a name or a message stands.
std::string mutated_text(Random& random, std::string text) {
  switch (random.below(10)) {
    case 0: return expression(random);
    case 1: return (random.once_in(2) ? "i32:" : "i64:") + expression(random);
    case 2: return std::string(1, "iotsh"[random.below(5)]) + number(random);
    case 3: return text + " " + atom(random) + " " + random.of(kOperators);
    case 4: return text.insert(random.below(text.size() + 1), random.of(kSignificant));
    case 5: return text.empty() ? text : text.erase(random.below(text.size()), 1 + random.below(4));
    case 6: return random.once_in(20) ? std::string(random.below(70000), "x1 "[random.below(3)]) : "";
    case 7: {
      // Another number in its place.
      const auto digit = [](char c) { return std::isdigit(static_cast<unsigned char>(c)) != 0; };
      const auto first = std::find_if(text.begin(), text.end(), digit);
      const auto end = std::find_if_not(first, text.end(), digit);
      return std::string(text.begin(), first) + number(random) + std::string(end, text.end());
    }
    case 8: {
      std::string out;
      for (size_t times = 1 + random.below(random.once_in(10) ? 70 : 3); times > 0; --times) out += text + " ";
      return out;
    }
    default: return random.of(kNumbers);
  }
}

void mutate_list(Random& random, Tree* tree, const std::vector<Tree*>& all) {
  const Tree donor = *all[random.below(all.size())];
  const size_t at = random.below(tree->items.size() + 1);
  const bool object = tree->kind == Tree::Kind::kObject;
  const auto insert = [&](size_t place, Tree item, std::string key) {
    tree->items.insert(tree->items.begin() + static_cast<long>(place), std::move(item));
    if (object) tree->keys.insert(tree->keys.begin() + static_cast<long>(place), std::move(key));
  };
  if (at == tree->items.size()) return insert(at, donor, "extra");
  const Tree item = tree->items[at];
  const std::string key = object ? tree->keys[at] : "";
  switch (random.below(7)) {
    case 0:
    case 1:
      tree->items.erase(tree->items.begin() + static_cast<long>(at));
      if (object) tree->keys.erase(tree->keys.begin() + static_cast<long>(at));
      return;
    case 2: return insert(at, item, key);
    case 3: return insert(at, donor, key);
    case 4: std::swap(tree->items[at], tree->items[random.below(tree->items.size())]); return;
    case 5: tree->items[at] = donor; return;
    default: {
      const size_t length = item.write().size() + 1;
      const size_t times = random.once_in(200) ? 70000 : random.once_in(20) ? 300 : 8;
      tree->items.insert(tree->items.end(), std::min(times, (256 << 10) / length), item);
      while (object && tree->keys.size() < tree->items.size()) {
        tree->keys.push_back("k" + std::to_string(tree->keys.size()));
      }
    }
  }
}

void mutate(Random& random, Tree* root) {
  std::vector<Tree*> all;
  collect(root, &all);
  Tree* const tree = all[random.below(all.size())];
  switch (tree->kind) {
    case Tree::Kind::kText: tree->text = mutated_text(random, tree->text); break;
    case Tree::Kind::kWord: tree->text = number(random); break;
    default: mutate_list(random, tree, all); break;
  }
  if (!random.once_in(60)) return;
  Tree nested;
  nested.kind = Tree::Kind::kList;
  for (size_t depth = random.below(80); depth > 0; --depth) {
    Tree outer;
    outer.kind = Tree::Kind::kList;
    outer.items.push_back(std::move(nested));
    nested = std::move(outer);
  }
  *tree = std::move(nested);
}

void mutate_bytes(Random& random, std::string* text) {
  for (size_t times = 1 + random.below(4); times > 0 && !text->empty(); --times) {
    const size_t at = random.below(text->size());
    switch (random.below(4)) {
      case 0: (*text)[at] = static_cast<char>(random.next()); break;
      case 1: text->insert(at, random.of(kSignificant)); break;
      case 2: text->erase(at, 1 + random.below(8)); break;
      default: text->resize(at); break;
    }
  }
}

// Numbers of an image that are worth another value: those of its header and of its tables.
void mutate_number(Random& random, std::string* image) {
  const auto read = [&](size_t at, size_t size) {
    uint64_t value = 0;
    if (at + size <= image->size()) std::memcpy(&value, image->data() + at, size);
    return value;
  };
  static constexpr size_t kHeader[][2] = {{4, 1}, {5, 1}, {16, 2}, {18, 2}, {32, 8}, {40, 8}, {52, 2}, {54, 2}, {56, 2},
                                          {58, 2}, {60, 2}, {62, 2}};
  static constexpr size_t kSection[][2] = {{0, 4}, {4, 4}, {8, 8}, {24, 8}, {32, 8}, {40, 4}, {44, 4}, {56, 8}};
  static constexpr size_t kSegment[][2] = {{0, 4}, {8, 8}, {32, 8}, {40, 8}};
  size_t at = 0, size = 0;
  const auto choose = [&](size_t base, const size_t (&place)[2]) { at = base + place[0], size = place[1]; };
  switch (random.below(4)) {
    case 0: choose(0, random.of(kHeader)); break;
    case 1: choose(read(32, 8) + 56 * random.below(read(56, 2)), random.of(kSegment)); break;
    default: choose(read(40, 8) + 64 * random.below(read(60, 2)), random.of(kSection)); break;
  }
  if (at > image->size() || image->size() - at < size) return;
  const uint64_t whole = image->size(), old = read(at, size);
  const uint64_t values[] = {0, 1, 2, 3, 8, old + 1, old - 1, old + 8, uint64_t{0} - old, whole, whole - 1, whole + 1,
                             whole - old, 0x7F, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, uint64_t{1} << 63, ~uint64_t{0},
                             random.next()};
  const uint64_t value = random.of(values);
  std::memcpy(image->data() + at, &value, size);
}

void mutate_image(Random& random, std::string* image) {
  for (size_t times = 1 + random.below(3); times > 0; --times) {
    if (!random.once_in(4)) mutate_number(random, image);
    else if (random.once_in(2)) mutate_bytes(random, image);
    else if (random.once_in(2)) image->resize(random.below(image->size() + 1));
    else image->append(random.below(5000), '\0');
  }
}

int64_t size(Random& random, int64_t usual) {
  static constexpr int64_t kSizes[] = {0, 1, 2, 3, 7, 128, 1000, 65536, int64_t{1} << 31, int64_t{1} << 40, INT64_MAX,
                                       -1};
  return random.once_in(12) ? random.of(kSizes) : usual;
}

std::vector<int64_t> sizes(Random& random, std::vector<int64_t> usual) {
  for (int64_t& each : usual) each = size(random, each);
  if (random.once_in(25)) usual.resize(random.below(random.once_in(4) ? 40 : 5), 2);
  return usual;
}

std::vector<Input> inputs(Random& random, const Seed& seed) {
  std::vector<Input> out;
  for (size_t index = 0; index < kHosts; ++index) {
    Input input;
    input.present = index < seed.hosts.size() ? !random.once_in(20) : random.once_in(20);
    input.type = random.once_in(20) ? 1 : random.once_in(3) ? 6 : 7;
    if (index < seed.hosts.size()) input.values = seed.hosts[index];
    for (int64_t& value : input.values) value = size(random, value);
    if (random.once_in(15)) input.values.resize(random.below(6));
    input.sizes = {static_cast<int64_t>(input.values.size())};
    if (random.once_in(30)) input.sizes.insert(input.sizes.begin(), random.once_in(2) ? 40 : 2, 1);
    out.push_back(std::move(input));
  }
  for (const std::vector<int64_t>& usual : seed.inputs) {
    Input input;
    input.present = !random.once_in(30);
    input.sizes = sizes(random, usual);
    input.address = 4096 + (random.once_in(3) ? random.below(256) : 16 * random.below(16));
    out.push_back(std::move(input));
  }
  return out;
}

std::string list(const std::vector<int64_t>& items) {
  std::string out;
  for (const int64_t item : items) out += (out.empty() ? "" : ",") + std::to_string(item);
  return "[" + out + "]";
}

std::string situation(Random& random, const std::vector<std::vector<Input>>& runs) {
  std::string out;
  for (const std::vector<Input>& run : runs) {
    std::string tensors, hosts, addresses;
    for (size_t index = 0; index < run.size(); ++index) {
      const Input& input = run[index];
      if (!input.present && random.once_in(2)) continue;
      std::string& into = index < kHosts ? hosts : tensors;
      into += (into.empty() ? "" : ",") + list(index < kHosts ? input.values : input.sizes);
      if (index >= kHosts) addresses += (addresses.empty() ? "" : ",") + std::to_string(input.address);
    }
    out += (out.empty() ? "" : ",") + ("{\"inputs\":[" + tensors + "],\"hosts\":[" + hosts + "],\"input_addresses\":[" +
           addresses + "],\"output_addresses\":[" + std::to_string(random.below(512)) + "]}");
  }
  return "{\"sm\":" + std::string(random.once_in(2) ? "90" : "75") + ",\"sms\":132,\"runs\":[" + out + "]}";
}

// PTX of a plan's kernels, as far as the library and the stand-in look at one.
std::string ptx_of(const Tree& plan) {
  std::string out = "//\n// Generated\n\n.version 9.0\n.target sm_80\n";
  for (const Tree& variant : plan.member("variants").items) {
    for (const Tree& step : variant.member("steps").items) {
      if (std::count(step.keys.begin(), step.keys.end(), "kernel") == 0) continue;
      out += ".visible .entry " + step.member("kernel").text + "(\n";
    }
  }
  return out;
}

}  // namespace

Tree Tree::parse(const std::string& text) { return Parser(text).value(); }

std::string Tree::write() const {
  if (kind == Kind::kWord) return text;
  if (kind == Kind::kText) return '"' + text + '"';
  std::string out(1, kind == Kind::kList ? '[' : '{');
  for (size_t index = 0; index < items.size(); ++index) {
    if (index > 0) out += ',';
    if (kind == Kind::kObject) out += '"' + keys[index] + "\":";
    out += items[index].write();
  }
  return out + (kind == Kind::kList ? ']' : '}');
}

const Tree& Tree::member(const std::string& key) const {
  const auto found = std::find(keys.begin(), keys.end(), key);
  if (found == keys.end()) throw std::invalid_argument("no member " + key);
  return items[static_cast<size_t>(found - keys.begin())];
}

Case make(const std::vector<Seed>& seeds, uint64_t number) {
  Random random(number);
  const Seed& seed = seeds[random.below(seeds.size())];
  Case out;
  const bool on_image = random.once_in(3);
  Tree plan = seed.plan;
  if (!on_image && !random.once_in(20)) {
    for (size_t times = 1 + random.below(3); times > 0; --times) mutate(random, &plan);
  }
  out.plan = plan.write();
  if (!on_image && random.once_in(10)) mutate_bytes(random, &out.plan);
  out.image = random.once_in(on_image ? 2 : 40) ? seeds[random.below(seeds.size())].image : seed.image;
  if (on_image && !random.once_in(20)) mutate_image(random, &out.image);
  for (size_t runs = 1 + random.below(4); runs > 0; --runs) out.runs.push_back(inputs(random, seed));
  out.node = on_image || random.once_in(2);
  if (!out.node) {
    out.situation = situation(random, out.runs);
    if (random.once_in(6)) {
      Tree tree = Tree::parse(out.situation);
      mutate(random, &tree);
      out.situation = tree.write();
    }
  }
  out.inputs = random.once_in(50) ? random.below(5) : seed.inputs.size();
  out.outputs = random.once_in(50) ? random.below(5) : seed.outputs;
  out.newer = !random.once_in(3);
  if (on_image && random.once_in(20)) out.image_type = 7;
  if (on_image && random.once_in(10)) out.image_name = random.once_in(2) ? "image_sm_90a" : "image_sm_80";
  out.compiled = on_image && random.once_in(8);
  static const std::string kStrings[] = {"", "%p", "%", "%%%", "a\xff", std::string("a\0b", 3), "\"\\\n", "..", "a/b",
                                         "/nowhere/%p.json", std::string(5000, 'a'), std::string(100000, '%')};
  if (random.once_in(50)) out.name = random.of(kStrings);
  if (random.once_in(50)) out.source = random.of(kStrings);
  if (random.once_in(100)) out.statistics = random.once_in(2) ? "statistics.%p.json" : random.of(kStrings);
  if (random.once_in(30)) out.launch_error = 2;
  if (random.once_in(30)) out.allocate_error = 2;
  if (random.once_in(30)) out.event_error = 2;
  out.capturing = random.once_in(30);
  if (random.once_in(8)) out.failing = 1 + static_cast<long>(random.below(random.once_in(4) ? 2000 : 100));
  if (random.once_in(30)) out.map_error = 2;
  if (random.once_in(30)) out.product_error = 15;
  if (random.once_in(10)) out.algorithms = 0;
  if (on_image && random.once_in(5)) {
    static const std::string kNames[] = {"image_compute_75", "image_compute_80", "image_compute_90",
                                         "image_compute_100"};
    out.image_name = random.of(kNames);
    if (!random.once_in(10)) out.image = ptx_of(seed.plan);
    if (random.once_in(2)) mutate_bytes(random, &out.image);
  }
  return out;
}

}  // namespace fuzz
