-- What a key holds: a version byte, a byte that names the form ('w', 'b', 't', 'q'), and the form's own fields.
-- Another version is an error and never a fresh start: forgetting what was used would be a silent reset.
--
-- Redis makes every function of a script anew at every call, and every local that a function captures. So there are
-- few of either, and constants are written where they are used: the forms as bytes, 119 'w', 98 'b', 116 't', 113 'q',
-- and 99 'c' of what lives in a key of its own; the roles, 63 '?' and 126 '~'. Numbers are written out with '%d': some
-- versions of Redis would make 2e+08 of 200000000, and what they make themselves costs twice as much.

-- The form of a value; nothing when there is no value.
local function form_of(value)
  local version, form = string.byte(value, 1, 2)
  if version and version ~= 1 then
    error('TOLLGATE unknown state version')
  end
  return form or version and 0
end

-- What is read is checked before anything is made of it: by hands and broken disks a value may hold anything, and a
-- number that is none fits every limit. The comparisons are written so that a NaN fails them. Times stay below 2^52 and
-- with them all that is made of them below 2^53, where a loop that adds one would no longer move.

-- What is needed once in a long while (rare.lua): a limit was edited, a clock has stepped back. The usual script
-- leaves it out, and asks to be called again with it.
local rare

-- The reader of buckets, where it is in the script: an edited exact window may have to do with them for a while.
local buckets_look
