package main

import (
	"cmp"
	"fmt"
)

// fill writes rows as acquires would, in a fraction of their time. Up to a million come in a random
// order, so that indexes are as loosely packed as they get in use; more would take minutes.
type fill struct {
	policy    string
	ephemeral bool
	prefix    string // of keys; defaults to userPrefix
	count     int
	tokens    int
	ago       string // when it was written; defaults to now
}

func (f fill) sql() string {
	table, ago, order := "buckets", "0", ""
	if f.ephemeral {
		table = "ephemeral_buckets"
	}
	if f.ago != "" {
		ago = f.ago
	}
	if f.count <= 1_000_000 {
		order = "order by hashint4(i)"
	}
	return fmt.Sprintf(`insert into ratelimit.%s (policy_id, level, refilled_at, due_at, key)
		select p.id, %d::bigint * 1000000, ratelimit.clock() - interval '%[3]s',
		       -- When clean-up would look: all different, as they are when written one by one.
		       ratelimit.clock() - interval '%[3]s' + i * interval '1 ms' + (p.capacity - %[2]d) * p.every / p.refill,
		       '%[7]s' || i
		  from generate_series(1, %[4]d) as i
		  join ratelimit.policies as p on p.name = '%[5]s'
		 %[6]s`, table, f.tokens, ago, f.count, f.policy, order, cmp.Or(f.prefix, userPrefix))
}

// inUse asks for every bucket once: the first update of a row makes it smaller. A batch of every hundredth key is a transaction,
// as it would be in use, where what a page has no room for goes to another page.
func (f fill) inUse() string {
	return fmt.Sprintf(`do $$ begin
		for i in 1..100 loop
			perform ratelimit_acquire_many(array_agg(text '%s'), array_agg('%s' || n)) from generate_series(i, %d, 100) as n having count(*) > 0;
			commit;
		end loop;
	end $$`, f.policy, cmp.Or(f.prefix, userPrefix), f.count)
}

// definePolicy defines one under which no bucket of the benchmark runs dry.
func definePolicy(name string, durable bool) string {
	return fmt.Sprintf("select ratelimit_define_policy('%s', %d, %d, '1 hour', durable => %t)", name, capacity, refillPerHour, durable)
}

// definePolicies defines the policy durable, and gives every bucket a row.
func definePolicies() []string {
	f := fill{policy: "durable", count: manyKeys, tokens: capacity / 2}
	return []string{definePolicy("durable", true), f.sql(), f.inUse(), fmt.Sprintf("select ratelimit_acquire('durable', '%s')", hotKey)}
}
