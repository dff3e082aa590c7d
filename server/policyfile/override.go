package policyfile

import "time"

// An Override gives one key of a policy numbers of its own. What the file leaves out is the policy's.
type Override struct {
	Policy, Key string
	Capacity    int64
	Refill      int64
	Every       Span

	// ExpiresAt ends the override. The zero time is never.
	ExpiresAt time.Time

	// At is where its key stands.
	At Position
}

func (r *reader) overrides(f field) (overrides []Override) {
	r.each(f, "the name of a policy, and below it the keys of buckets", func(f field) {
		r.checkPolicy(f.at, f.name)
		policy := r.policies[f.name]
		r.each(f, "the key of a bucket, and below it capacity, refill, every or expires_at", func(f field) {
			overrides = append(overrides, r.override(f, policy))
		})
	})
	return overrides
}

// override reads one. The policy is nil if the file has none of that name.
func (r *reader) override(f field, policy *Policy) Override {
	o := Override{Key: f.name, At: f.at}
	if policy != nil {
		o.Policy, o.Capacity, o.Refill, o.Every = policy.Name, policy.Capacity, policy.Refill, policy.Every
	}
	flawless := r.flawless(func() {
		r.checkName(f.at, "a key", f.name)
		isObject := r.object(f, "an override",
			known{"capacity", func(f field) { o.Capacity = r.whole(f, maxTokens) }},
			known{"refill", func(f field) { o.Refill = r.whole(f, maxTokens) }},
			known{"every", func(f field) { o.Every = r.span(f) }},
			known{"expires_at", func(f field) { o.ExpiresAt = r.instant(f) }},
		)
		if isObject && len(f.value.fields) == 0 {
			r.add(f.at, "override %s says nothing: write capacity, refill or every, or remove it", quote(f.name))
		}
	})
	if flawless && policy != nil && !policy.flawed {
		r.checkFill(f, o.Capacity, o.Refill, o.Every)
	}
	return o
}
