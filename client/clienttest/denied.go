package clienttest

import (
	"encoding/json"
	"fmt"
	"math/big"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/pgratelimit/client"
)

// Denied returns the error of a guard inside the database that refused, for tests of how a program handles it:
// [client.Denied] finds d in it, but for ResetAfter, which the error does not have. RetryAfter is cut to the microsecond.
func Denied(d client.Denial) error {
	policy, err := json.Marshal(d.Policy)
	if err != nil {
		return err
	}
	retryAfter, hint := "null", fmt.Sprintf("A cost of %d never fits a bucket of %d.", d.Cost, d.Capacity)
	if !d.Never() {
		retryAfter = strings.TrimRight(strings.TrimRight(big.NewRat(d.RetryAfter.Microseconds(), 1_000_000).FloatString(6), "0"), ".")
		hint = fmt.Sprintf("Try again in %s seconds.", retryAfter)
		if retryAfter == "1" {
			hint = "Try again in 1 second."
		}
	}
	return &pgconn.PgError{
		Severity: "ERROR",
		Code:     "RL429",
		Message:  "rate limit exceeded",
		Detail: fmt.Sprintf(`{"policy": %s, "cost": %d, "remaining": %d, "retry_after": %s, "capacity": %d}`,
			policy, d.Cost, d.Remaining, retryAfter, d.Capacity),
		Hint: hint,
	}
}
