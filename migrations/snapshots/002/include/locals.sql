{{- /* The contract of the fragments about one bucket: the locals that a function must declare to include them. locals_of_look
       is for look.sql; locals_of_lock for lock.sql, move.sql, write.sql, find_key.sql, and for look.sql with bare;
       locals_of_decide for decide.sql of kind "acquire", and locals_of_seen for decide.sql of the other kinds. The function
       sets the locals marked "in" before the fragment, and reads those marked "out" after it. It sets those marked "in/out"
       before the fragment, and the fragment changes them. Only fragments use those marked "inner".
       The argument function is the name of the function: the locals take over its arguments key, cost and idempotency_key.
       The argument cost is the name of that argument, if it has another. Types have their schema
       for functions without a search_path of their own. */ -}}
{{ define "locals_of_bucket" -}}
v_policy          ratelimit.policies;  -- in: the policy, with the numbers that apply to the key
  v_override        ratelimit.overrides;  -- inner: the override of the key
  v_key             text collate "C" := {{ .function }}.key;  -- in: the bucket's key
  v_cost            alias for {{ .function }}.{{ default "cost" .cost }};  -- in: tokens that the request asks for
  v_now             timestamptz;  -- in/out: the instant of the answer; what may wait reads the clock again
  v_has_row         boolean;      -- out: the bucket has a row; a bucket without a row is full
  v_level           bigint;       -- out: microtokens in the bucket
  v_reset_us        bigint;       -- out: microseconds until the bucket is full; null: never
{{- end }}
{{ define "locals_of_look" -}}
{{ template "locals_of_bucket" . }}
  v_retry_us        bigint;       -- out: microseconds until the bucket holds v_cost; null: never; of no meaning after a grant
{{- end }}
{{ define "locals_of_key" -}}
v_idempotency_key text collate "C" := {{ .function }}.idempotency_key;  -- in: null for none
  v_first           ratelimit.idempotency_keys;  -- out: the grant that is remembered under the idempotency key
  v_refilled_at     timestamptz;  -- inner: the instant at which the row says that the bucket held v_level
  v_again           ratelimit.policies;  -- inner: the policy, read again
{{- end }}
{{ define "locals_of_lock" -}}
{{ template "locals_of_bucket" . }}
  {{ template "locals_of_key" . }}
  v_held            bigint;       -- out: what the bucket held before the change
{{- end }}
{{ define "locals_of_decide" -}}
{{ template "locals_of_look" . }}
  {{ template "locals_of_key" . }}
  v_wanted          bigint;       -- in/out: v_cost in microtokens, or 0 if nothing can be taken
  v_due_at          timestamptz;  -- inner: when clean-up looks at a new bucket
  v_expires_at      timestamptz;  -- inner: when the idempotency key is forgotten
  v_round           integer;      -- inner: the rounds that took nothing and denied nothing; null is none
{{- end }}
{{ define "locals_of_seen" -}}
{{ template "locals_of_decide" . }}
  v_seen_level      bigint;       -- inner: the row as it was read
  v_seen_at         timestamptz;  -- inner: likewise
{{- end }}
