{{- /* The contract of look.sql and decide.sql: the locals that a function must declare to include one of them. The function
       sets the locals marked "in" before the fragment, and reads those marked "out" after it. It sets those marked
       "in/out" before the fragment, and the fragment changes them. Only the fragment itself uses those marked "inner".
       The argument is the name of a function: the locals take over its arguments key, cost and idempotency_key. With an
       empty argument, the function sets these locals itself. */ -}}
{{ define "locals_of_look" -}}
v_policy          policies;     -- in: the policy
  v_key             text collate "C"{{ with . }} := {{ . }}.key{{ end }};  -- in: the bucket's key
  v_cost            {{ with . }}alias for {{ . }}.cost{{ else }}bigint{{ end }};  -- in: tokens that one request asks for
  v_now             timestamptz;  -- in/out: the instant of the answer; decide reads the clock again before each look
  v_has_row         boolean;      -- out: the bucket has a row; a bucket without a row is full
  v_level           bigint;       -- out: microtokens in the bucket
  v_retry_us        bigint;       -- out: microseconds until the bucket holds v_cost; null: never; of no meaning after a grant
  v_reset_us        bigint;       -- out: microseconds until the bucket is full
{{- end }}
{{ define "locals_of_decide" -}}
{{ template "locals_of_look" . }}
  v_idempotency_key text collate "C"{{ with . }} := {{ . }}.idempotency_key{{ end }};  -- in: null for none
  v_wanted          bigint;       -- in/out: microtokens to take, 0 for none; v_cost as microtokens, or for a run a multiple
                                  --         of it, which decide lowers to the requests that the bucket covers
  v_taken           bigint;       -- out: microtokens taken; 0 after a denial; of no meaning after a replay
  v_replayed        boolean;      -- in/out: null before; true when a live idempotency key was found, and then only v_first counts
  v_first           idempotency_keys;  -- out, when v_replayed: the grant that is remembered under the idempotency key
  v_refilled_at     timestamptz;  -- out, after a grant: the instant at which the row says that the bucket held v_level
  v_due_at          timestamptz;  -- inner: when clean-up looks at a new bucket
  v_expires_at      timestamptz;  -- inner: when the idempotency key is forgotten
  v_round           integer;      -- in/out: null before; the rounds that took nothing and denied nothing
{{- end }}
