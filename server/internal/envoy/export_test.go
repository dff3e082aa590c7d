package envoy

import "github.com/pgratelimit/pgratelimit/server/policyfile"

// NewRules makes rules of one domain.
func NewRules(domain policyfile.EnvoyDomain) (*Rules, error) {
	return newRules([]policyfile.EnvoyDomain{domain})
}
