// Cases of a test program: `program` lists them, `program NAME ...` runs some. The first failed CHECK ends
// it.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

namespace test {

struct Case {
  const char* name;
  void (*run)();
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

struct Registration {
  Registration(const char* name, void (*run)()) { cases().push_back({name, run}); }
};

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
  std::exit(1);
}

template <typename A, typename B>
void check_equal(const A& a, const B& b, const char* text, const char* file, int line) {
  if (a == b) return;
  std::ostringstream what;
  what << text << ": " << a << " and " << b;
  fail(file, line, what.str());
}

inline int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    bool found = false;
    for (const Case& c : cases()) {
      if (std::strcmp(c.name, argv[i]) != 0) continue;
      found = true;
      c.run();
      std::printf("%s: passed\n", c.name);
    }
    if (!found) fail(argv[0], 0, std::string("no case is called ") + argv[i]);
  }
  if (argc == 1) {
    for (const Case& c : cases()) std::printf("%s\n", c.name);
  }
  return 0;
}

}  // namespace test

#define CASE(name)                                            \
  static void name();                                         \
  static test::Registration registration_##name(#name, name); \
  static void name()

#define CHECK(condition) \
  if (!(condition)) test::fail(__FILE__, __LINE__, #condition)

#define CHECK_EQUAL(a, b) test::check_equal(a, b, #a " == " #b, __FILE__, __LINE__)
