{{- /* Takes v_wanted from one bucket if it covers that. FOUND tells. The argument buckets is the name of the table. The locals
       are declared in locals.sql, with those of decide.
       With the argument until, a local, it is enough that the bucket covers v_wanted at that instant; the rest is debt. The
       update rounds the refill down to whole microtokens, so the debt may be paid a microtoken later than the bucket as it
       was would have covered v_wanted: the bucket counts for one less. That the debt ends above the floor shows in the
       stored level. Of the buckets that cover v_wanted, only those within a hair of until or of the floor are left alone. */ -}}
update {{ .buckets }} as b
           set level       = {{ template "refilled_level" (dict "bucket" "b.") }} - v_wanted,
               refilled_at = refilled_until(b.refilled_at, v_now, v_policy.tick),
               room        = null
         where b.policy_id = v_policy.id
           and b.key       = v_key
           {{- if .until }}
           and {{ template "refilled_level" (dict "bucket" "b." "level" "b.level - 1" "now" .until) }} >= v_wanted
           and b.level    >= v_wanted - deepest_debt()
           {{- else }}
           and {{ template "refilled_level" (dict "bucket" "b.") }} >= v_wanted
           {{- end }}
        returning b.level, b.refilled_at into v_level, v_refilled_at;
{{- /**/ -}}
