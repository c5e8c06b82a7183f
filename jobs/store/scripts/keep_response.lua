#!lua
-- Stores a response, unless it is stored already or its tenant has too many.
--
-- KEYS  response: hash of the response
--       of_tenant: sorted set of the responses of its tenant
-- ARGV  job_id: id of its job
--       tenant: name of its tenant; '' for none, which has no limit
--       content: the response, as JSON
--       seconds: after which it expires
--       limit: responses that the tenant may have; 0 for no limit
-- Returns {'kept'}; {'exists', tenant, content} if a response of this job is stored; {'full', count} at the
--       limit. Nothing has changed after the last two.
--
-- Idempotent: the client library resends a script when the connection breaks before the reply. The
-- second run finds what the first one has stored.
--
-- Atomic: the server runs the whole script before any other command. A full Redis refuses it.
local response, of_tenant = unpack(KEYS)
local job_id, tenant, content, seconds, limit = unpack(ARGV)

if redis.call('EXISTS', response) == 1 then
  local stored = redis.call('HMGET', response, 'tenant', 'content')
  return {'exists', stored[1] or '', stored[2] or ''}
end
if tenant ~= '' then
  local now = tonumber(redis.call('TIME')[1])
  redis.call('ZREMRANGEBYSCORE', of_tenant, '-inf', now)
  local count = redis.call('ZCARD', of_tenant)
  if tonumber(limit) > 0 and count >= tonumber(limit) then return {'full', tostring(count)} end
  redis.call('ZADD', of_tenant, now + seconds, job_id)
  if redis.call('TTL', of_tenant) < tonumber(seconds) then
    redis.call('EXPIRE', of_tenant, seconds)
  end
end
redis.call('HSET', response, 'tenant', tenant, 'content', content)
redis.call('EXPIRE', response, seconds)
return {'kept'}
