package jsonapi

import (
	"context"
	"net/http"
	"regexp"
	"strconv"
	"time"
)

// timeoutHeader is how long a caller waits, in seconds: what a deadline is to gRPC.
const timeoutHeader = "Request-Timeout"

// decimal is a number as programs write a rest of seconds: 0.5, .5, 0.30000000000000004, and 5e-05.
var decimal = regexp.MustCompile(`^([0-9]{1,9}(\.[0-9]*)?|\.[0-9]+)(e-[0-9]{1,3})?$`)

// Timeout ends the work for requests whose callers have stopped waiting, as far as they said when that would be.
func Timeout(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		text := r.Header.Get(timeoutHeader)
		if text == "" {
			next.ServeHTTP(w, r)
			return
		}
		seconds, _ := strconv.ParseFloat(text, 64)
		if !decimal.MatchString(text) || seconds == 0 {
			Problem{Title: "the time cannot be read", Status: http.StatusBadRequest, Detail: timeoutHeader + " is in seconds, more than 0 and less than 1000000000, without a unit, such as 0.25."}.Write(w)
			return
		}
		ctx, cancel := context.WithTimeout(r.Context(), time.Duration(seconds*float64(time.Second)))
		defer cancel()
		next.ServeHTTP(w, r.WithContext(ctx))
	})
}
