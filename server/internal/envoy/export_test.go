package envoy

// NewRules makes rules of domains.
var NewRules = newRules
