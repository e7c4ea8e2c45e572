-- What a Redis script may see: Redis's own objects, and the part of Lua 5.1 that its sandbox leaves.
-- No `os`, `io`, `require` or `print`: using one is a mistake that only a running server would find.
stds.redis = {
  read_globals = {
    "KEYS", "ARGV",
    redis = { fields = { "call", "pcall", "error_reply", "status_reply", "log", "sha1hex", "replicate_commands",
                         "LOG_DEBUG", "LOG_VERBOSE", "LOG_NOTICE", "LOG_WARNING" } },
    struct = { fields = { "pack", "unpack", "size" } },
    bit = { fields = { "band", "bor", "bxor", "bnot", "lshift", "rshift", "arshift", "rol", "ror", "bswap", "tobit", "tohex" } },
    cjson = { fields = { "encode", "decode" } },
    cmsgpack = { fields = { "pack", "unpack" } },
    "assert", "error", "ipairs", "next", "pairs", "pcall", "select", "tonumber", "tostring", "type", "unpack",
    math = { fields = { "abs", "ceil", "floor", "fmod", "huge", "max", "min", "modf" } },
    string = { fields = { "byte", "char", "find", "format", "gmatch", "gsub", "len", "lower", "match", "rep", "reverse",
                          "sub", "upper" } },
    table = { fields = { "concat", "insert", "remove", "sort" } },
  },
}
std = "redis"
max_line_length = 120
