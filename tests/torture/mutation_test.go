package torture

import (
	"github.com/pgratelimit/pgratelimit/tests/kit"
)

// settleTwice has ratelimit_settle count a settlement that was made already.
var settleTwice = kit.Mutation{Pattern: `(update idempotency_keys as k set settled = [^;]*?)and k.settled is null`, Replacement: "$1"}

// pauseBefore has other sessions come to the same place, where they would seldom meet by chance.
func pauseBefore(pattern string) kit.Mutation {
	return kit.Mutation{Pattern: pattern, Replacement: "perform pg_sleep(0.002); $0"}
}
