-- What a key holds: a version byte, a byte that names the form, and the form's own fields. Another version is an error
-- and never a fresh start: forgetting what was used would be a silent reset.
local VERSION = 1

-- The form of a value: nil when there is no value.
local function form_of(value)
  if value == '' then
    return nil
  end
  local version, form = struct.unpack('>BB', value)
  if version ~= VERSION then
    error('TOLLGATE unknown state version')
  end
  return string.char(form)
end
