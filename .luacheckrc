-- The files of lua/ are joined into one script, in the order of src/limit/store/redis/script.rs.
std = "lua51"
read_globals = { "redis", "struct", "KEYS", "ARGV" }
max_line_length = 120
