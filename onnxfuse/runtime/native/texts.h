// Texts of other people: names in models, messages of drivers, paths.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace onnxfuse {

// How many bytes the character at a place has, 0 where the bytes are no UTF-8; and its code point.
size_t character(std::string_view text, size_t at, unsigned* code);

// The text as UTF-8, with U+FFFD for each byte that is none.
std::string readable(std::string_view text);

// The text in one line, for a message: what steers a terminal, or hides, stands there as its code ("\x1b", "\n",
// "\u202e"), and so does each byte that is no UTF-8 ("\xff").  The same rule as onnxfuse/visible.py, but for characters
// that Unicode has not assigned.  To pass a text through twice changes nothing.
std::string visible(std::string_view text);

// The same for a message of several lines: its line ends and tabs stay.  Every message passes through it on its way out
// of the library: into a status (Api::status), to the callers in library.cc, to stderr (say).
std::string visible_lines(std::string_view text);

// A text in a message: whole where it is short, else its start and "..."; in one line.
std::string excerpt(std::string_view text);

// Writes "onnxfuse: " and the message to stderr.
void say(std::string_view message) noexcept;

}  // namespace onnxfuse
